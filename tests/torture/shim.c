/* A library for LD_PRELOAD between a program and its disk: it counts the calls that change what is
 * below one directory, lets them fail, cuts writes short, kills the process ahead of one, keeps a
 * log from which the content of the disk after a power loss follows (power.py), and moves the
 * clock.
 *
 * TORTURE_ROOT    the directory, an absolute path without links; nothing happens without it
 * TORTURE_STATE   a file of 2 counters of 8 bytes, shared by all processes: calls, and calls hit
 * TORTURE_KIND    fail, short or kill: what happens to calls; count, or nothing: nothing
 * TORTURE_CALLS   classes of calls that count, as "write,sync"; default: all
 * TORTURE_AT      which one is hit, from 1 on; 0: all
 * TORTURE_STICKY  1: all later ones, too
 * TORTURE_ERRNO   the error of `fail`
 * TORTURE_SIGNAL  the signal of `kill`; default: SIGKILL
 * TORTURE_LOG     a file to which every call that was made is appended
 * TORTURE_CLOCK   seconds by which the wall clock is wrong
 * TORTURE_JUMP    after so many readings of the clock it is wrong in the other direction
 * TORTURE_NFS     1: a file that is open when it is removed gets another name until it is closed
 * TORTURE_LOCKS   the error of every lock, as of a server without a lock daemon
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&(name)))dlsym(RTLD_NEXT, #name))

static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static char root[PATH_MAX];
static char classes[256];
static _Atomic uint64_t *state;
static uint64_t at;
static int error_number, signal_number, log_fd = -1, lock_error;
static bool armed, sticky, fails, shortens, kills, nfs;
static long clock_offset, clock_jump;
static atomic_long clock_readings;

static long number(const char *name) {
  const char *text = getenv(name);
  return text ? atol(text) : 0;
}

static int raw_open(const char *path, int flags) {
  return (int)syscall(SYS_openat, AT_FDCWD, path, flags | O_CLOEXEC, 0600);
}

/* The environment is read when it is there: a process can be told after it was forked. */
static bool ready(void) {
  if (armed) return true;
  const char *directory = getenv("TORTURE_ROOT");
  if (!directory) return false;
  snprintf(root, sizeof root, "%s", directory);
  const char *kind = getenv("TORTURE_KIND"), *names = getenv("TORTURE_CALLS");
  fails = kind && !strcmp(kind, "fail");
  shortens = kind && !strcmp(kind, "short");
  kills = kind && !strcmp(kind, "kill");
  snprintf(classes, sizeof classes, ",%s,", names ? names : "");
  at = (uint64_t)number("TORTURE_AT");
  sticky = number("TORTURE_STICKY");
  error_number = (int)number("TORTURE_ERRNO");
  signal_number = getenv("TORTURE_SIGNAL") ? (int)number("TORTURE_SIGNAL") : SIGKILL;
  lock_error = (int)number("TORTURE_LOCKS");
  nfs = number("TORTURE_NFS");
  const char *path = getenv("TORTURE_STATE");
  if (path) {
    int fd = raw_open(path, O_RDWR);
    void *found = mmap(NULL, 16, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    state = found == MAP_FAILED ? NULL : found;
    syscall(SYS_close, fd);
  }
  path = getenv("TORTURE_LOG");
  if (path) log_fd = raw_open(path, O_WRONLY | O_APPEND | O_CREAT);
  armed = true;
  return true;
}

/* ---- which file ------------------------------------------------------------------------ */

static bool below(const char *path) {
  size_t length = strlen(root);
  return !strncmp(path, root, length) && (path[length] == '/' || path[length] == 0);
}

static bool path_of_fd(int fd, char *path) {
  char link[40];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, PATH_MAX - 1);
  if (length <= 0) return false;
  path[length] = 0;
  return true;
}

static bool absolute(int directory, const char *name, char *path) {
  char start[PATH_MAX];
  if (name[0] == '/') {
    snprintf(path, PATH_MAX, "%s", name);
    return true;
  }
  if (directory == AT_FDCWD ? !getcwd(start, sizeof start) : !path_of_fd(directory, start))
    return false;
  return snprintf(path, PATH_MAX, "%s/%s", start, name) < PATH_MAX;
}

static bool path_is_ours(int directory, const char *name, char *path) {
  return ready() && absolute(directory, name, path) && below(path);
}

static bool fd_is_ours(int fd, char *path) {
  return ready() && path_of_fd(fd, path) && below(path);
}

static uint64_t inode_of(const char *path) {
  struct stat status;
  return fstatat(AT_FDCWD, path, &status, AT_SYMLINK_NOFOLLOW) ? 0 : status.st_ino;
}

/* ---- log ------------------------------------------------------------------------------- */

struct record {
  char what; /* create, truncate, write, size, fsync, Failed fsync, mkdir, rename, unlink, rmdir,
                link, map */
  uint8_t unused[3];
  uint16_t first, second;         /* bytes of the paths that follow */
  uint64_t inode, offset, length; /* length: of the data after the paths; of s: the size */
};

static void put(char what, uint64_t inode, uint64_t offset, uint64_t length, const void *data,
                const char *first, const char *second) {
  if (log_fd < 0) return;
  struct record head = {what, {0}, 0, 0, inode, offset, length};
  head.first = (uint16_t)(first ? strlen(first) : 0);
  head.second = (uint16_t)(second ? strlen(second) : 0);
  struct iovec parts[] = {{&head, sizeof head},
                          {(void *)(uintptr_t)first, head.first},
                          {(void *)(uintptr_t)second, head.second},
                          {(void *)(uintptr_t)data, data ? length : 0}};
  int before = errno;
  if (syscall(SYS_writev, log_fd, parts, 4) < 0) abort();
  errno = before;
}

static uint64_t inode_of_fd(int fd) {
  struct stat status;
  return fstat(fd, &status) ? 0 : status.st_ino;
}

/* ---- what happens ---------------------------------------------------------------------- */

enum fate { GOES, FAILS, SHORT };

/* Counts a call of this class; it may not return. */
static enum fate fate_of(const char *class) {
  char wanted[40];
  snprintf(wanted, sizeof wanted, ",%s,", class);
  if (strcmp(classes, ",,") && !strstr(classes, wanted)) return GOES;
  if (!state) return GOES;
  uint64_t count = atomic_fetch_add(&state[0], 1) + 1;
  if (at && count != at && !(sticky && count > at)) return GOES;
  if (!fails && !shortens && !kills) return GOES;
  atomic_fetch_add(&state[1], 1);
  if (kills) {
    kill(getpid(), signal_number);
    return GOES;
  }
  return shortens ? SHORT : FAILS;
}

#define LOCKED(body)                                                                               \
  do {                                                                                             \
    pthread_mutex_lock(&turn);                                                                     \
    body;                                                                                          \
    int after_ = errno;                                                                            \
    pthread_mutex_unlock(&turn);                                                                   \
    errno = after_;                                                                                \
  } while (0)

/* ---- writing --------------------------------------------------------------------------- */

static ssize_t write_at(int fd, const void *data, size_t size, off_t offset, bool positioned) {
  char path[PATH_MAX];
  if (!fd_is_ours(fd, path))
    return positioned ? syscall(SYS_pwrite64, fd, data, size, offset)
                      : syscall(SYS_write, fd, data, size);
  ssize_t done = -1;
  LOCKED({
    enum fate fate = fate_of("write");
    if (fate == FAILS) {
      errno = error_number;
    } else {
      if (fate == SHORT && size > 1) size /= 2;
      if (!positioned)
        offset = (fcntl(fd, F_GETFL) & O_APPEND) ? lseek(fd, 0, SEEK_END) : lseek(fd, 0, SEEK_CUR);
      done = positioned ? syscall(SYS_pwrite64, fd, data, size, offset)
                        : syscall(SYS_write, fd, data, size);
      if (done > 0) put('w', inode_of_fd(fd), (uint64_t)offset, (uint64_t)done, data, NULL, NULL);
    }
  });
  return done;
}

ssize_t write(int fd, const void *data, size_t size) { return write_at(fd, data, size, 0, false); }

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
  return write_at(fd, data, size, offset, true);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off_t offset) {
  return write_at(fd, data, size, offset, true);
}

/* Vectors piece by piece: an incomplete write is allowed, and ends the call. */
static ssize_t vector_at(int fd, const struct iovec *parts, int count, off_t offset,
                         bool positioned) {
  ssize_t total = 0;
  for (int i = 0; i < count; i++) {
    if (!parts[i].iov_len) continue;
    ssize_t done = write_at(fd, parts[i].iov_base, parts[i].iov_len, offset + total, positioned);
    if (done < 0) return total ? total : -1;
    total += done;
    if ((size_t)done < parts[i].iov_len) break;
  }
  return total;
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
  char path[PATH_MAX];
  if (!fd_is_ours(fd, path)) return syscall(SYS_writev, fd, parts, count);
  return vector_at(fd, parts, count, 0, false);
}

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) {
  return vector_at(fd, parts, count, offset, true);
}

ssize_t pwritev64(int fd, const struct iovec *parts, int count, off_t offset) {
  return vector_at(fd, parts, count, offset, true);
}

/* Not supported between our files: callers have another way, which is seen. */
ssize_t copy_file_range(int from, off64_t *start, int to, off64_t *place, size_t size,
                        unsigned flags) {
  char path[PATH_MAX];
  if (fd_is_ours(to, path)) {
    errno = EXDEV;
    return -1;
  }
  return syscall(SYS_copy_file_range, from, start, to, place, size, flags);
}

ssize_t sendfile(int to, int from, off_t *offset, size_t size) {
  char path[PATH_MAX];
  if (fd_is_ours(to, path)) {
    errno = EINVAL;
    return -1;
  }
  return syscall(SYS_sendfile, to, from, offset, size);
}

ssize_t sendfile64(int to, int from, off64_t *offset, size_t size) {
  return sendfile(to, from, offset, size);
}

/* ---- size ------------------------------------------------------------------------------ */

static int sized(int fd, off_t size, bool allocated) {
  char path[PATH_MAX];
  int result = -1;
  if (!fd_is_ours(fd, path))
    return allocated ? REAL(posix_fallocate)(fd, 0, size) : (int)syscall(SYS_ftruncate, fd, size);
  LOCKED({
    if (fate_of("allocate") != GOES && !shortens) {
      errno = error_number;
      result = allocated ? error_number : -1;
    } else {
      result =
          allocated ? REAL(posix_fallocate)(fd, 0, size) : (int)syscall(SYS_ftruncate, fd, size);
      if (!result) put(allocated ? 's' : 't', inode_of_fd(fd), 0, (uint64_t)size, NULL, NULL, NULL);
    }
  });
  return result;
}

int ftruncate(int fd, off_t size) { return sized(fd, size, false); }

int ftruncate64(int fd, off64_t size) { return sized(fd, size, false); }

int posix_fallocate(int fd, off_t offset, off_t size) { return sized(fd, offset + size, true); }

int posix_fallocate64(int fd, off64_t offset, off64_t size) {
  return sized(fd, offset + size, true);
}

int fallocate(int fd, int mode, off_t offset, off_t size) {
  char path[PATH_MAX];
  if (!fd_is_ours(fd, path)) return (int)syscall(SYS_fallocate, fd, mode, offset, size);
  if (mode) {
    errno = EOPNOTSUPP;
    return -1;
  }
  int failed = sized(fd, offset + size, true);
  errno = failed ? failed : errno;
  return failed ? -1 : 0;
}

int fallocate64(int fd, int mode, off64_t offset, off64_t size) {
  return fallocate(fd, mode, offset, size);
}

/* ---- syncing --------------------------------------------------------------------------- */

static long moved_clock(void);

static int synced(int fd, long call) {
  char path[PATH_MAX];
  int result = -1;
  if (!fd_is_ours(fd, path)) return (int)syscall(call, fd);
  LOCKED({
    if (fate_of("sync") != GOES && !shortens) {
      errno = error_number;
      put('F', inode_of_fd(fd), 0, 0, NULL, NULL, NULL);
    } else {
      result = (int)syscall(call, fd);
      if (!result) put('f', inode_of_fd(fd), 0, 0, NULL, NULL, NULL);
      if (clock_offset) { /* times of files are those of the clock */
        struct timespec now[2];
        now[0].tv_sec = now[1].tv_sec = moved_clock();
        now[0].tv_nsec = now[1].tv_nsec = 0;
        futimens(fd, now);
      }
    }
  });
  return result;
}

int fsync(int fd) { return synced(fd, SYS_fsync); }

int fdatasync(int fd) { return synced(fd, SYS_fdatasync); }

/* Promises nothing about metadata: the log does not have it. */
int sync_file_range(int fd, off64_t offset, off64_t size, unsigned flags) {
  char path[PATH_MAX];
  int result = -1;
  if (!fd_is_ours(fd, path)) return (int)syscall(SYS_sync_file_range, fd, offset, size, flags);
  LOCKED({
    if (fate_of("sync") != GOES && !shortens)
      errno = error_number;
    else
      result = (int)syscall(SYS_sync_file_range, fd, offset, size, flags);
  });
  return result;
}

/* ---- names ----------------------------------------------------------------------------- */

static int opened(int directory, const char *name, int flags, mode_t mode) {
  char path[PATH_MAX];
  if (!(flags & (O_CREAT | O_TRUNC)) || !path_is_ours(directory, name, path))
    return (int)syscall(SYS_openat, directory, name, flags, mode);
  int fd = -1;
  LOCKED({
    if (fate_of("create") != GOES && !shortens) {
      errno = error_number;
    } else {
      uint64_t before = inode_of(path);
      fd = (int)syscall(SYS_openat, directory, name, flags, mode);
      if (fd >= 0 && !before)
        put('c', inode_of_fd(fd), 0, 0, NULL, path, NULL);
      else if (fd >= 0 && (flags & O_TRUNC))
        put('t', inode_of_fd(fd), 0, 0, NULL, NULL, NULL);
    }
  });
  return fd;
}

#define MODE(flags)                                                                                \
  mode_t mode = 0;                                                                                 \
  if ((flags) & (O_CREAT | O_TMPFILE)) {                                                           \
    va_list more;                                                                                  \
    va_start(more, flags);                                                                         \
    mode = va_arg(more, mode_t);                                                                   \
    va_end(more);                                                                                  \
  }

int open(const char *path, int flags, ...) {
  MODE(flags)
  return opened(AT_FDCWD, path, flags, mode);
}

int open64(const char *path, int flags, ...) {
  MODE(flags)
  return opened(AT_FDCWD, path, flags | O_LARGEFILE, mode);
}

int openat(int directory, const char *path, int flags, ...) {
  MODE(flags)
  return opened(directory, path, flags, mode);
}

int openat64(int directory, const char *path, int flags, ...) {
  MODE(flags)
  return opened(directory, path, flags | O_LARGEFILE, mode);
}

static int renamed(int from, const char *old, int to, const char *new, unsigned flags) {
  char first[PATH_MAX];
  char second[PATH_MAX];
  bool ours = path_is_ours(from, old, first);
  if (!path_is_ours(to, new, second) || !ours)
    return (int)syscall(SYS_renameat2, from, old, to, new, flags);
  int result = -1;
  LOCKED({
    if (fate_of("rename") != GOES && !shortens) {
      errno = error_number;
    } else {
      result = (int)syscall(SYS_renameat2, from, old, to, new, flags);
      if (!result) put('r', inode_of(second), 0, 0, NULL, first, second);
    }
  });
  return result;
}

int rename(const char *old, const char *new) { return renamed(AT_FDCWD, old, AT_FDCWD, new, 0); }

int renameat(int from, const char *old, int to, const char *new) {
  return renamed(from, old, to, new, 0);
}

int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
  return renamed(from, old, to, new, flags);
}

int mkdirat(int directory, const char *name, mode_t mode) {
  char path[PATH_MAX];
  if (!path_is_ours(directory, name, path)) return (int)syscall(SYS_mkdirat, directory, name, mode);
  int result = -1;
  LOCKED({
    if (fate_of("mkdir") != GOES && !shortens) {
      errno = error_number;
    } else {
      result = (int)syscall(SYS_mkdirat, directory, name, mode);
      if (!result) put('m', inode_of(path), 0, 0, NULL, path, NULL);
    }
  });
  return result;
}

int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

/* Files that were removed while this process had them open, as clients of NFS keep them. */
static struct {
  int fd;
  char path[PATH_MAX];
} kept[64];

static int fd_of_inode(uint64_t inode) {
  for (int fd = 0; fd < 1024; fd++) {
    struct stat status;
    if (!fstat(fd, &status) && status.st_ino == inode && S_ISREG(status.st_mode)) return fd;
  }
  return -1;
}

static bool keep(const char *path) {
  struct stat status;
  if (!nfs || fstatat(AT_FDCWD, path, &status, AT_SYMLINK_NOFOLLOW) || !S_ISREG(status.st_mode))
    return false;
  int fd = fd_of_inode(status.st_ino);
  for (int i = 0; fd >= 0 && i < 64; i++) {
    if (kept[i].path[0]) continue;
    const char *slash = strrchr(path, '/');
    snprintf(kept[i].path, PATH_MAX, "%.*s/.nfs%016lx", (int)(slash - path), path,
             (unsigned long)status.st_ino);
    kept[i].fd = fd;
    return !syscall(SYS_renameat2, AT_FDCWD, path, AT_FDCWD, kept[i].path, 0);
  }
  return false;
}

int unlinkat(int directory, const char *name, int flags) {
  char path[PATH_MAX];
  if (!path_is_ours(directory, name, path))
    return (int)syscall(SYS_unlinkat, directory, name, flags);
  int result = -1;
  LOCKED({
    if (fate_of(flags & AT_REMOVEDIR ? "rmdir" : "unlink") != GOES && !shortens) {
      errno = error_number;
    } else if (!(flags & AT_REMOVEDIR) && keep(path)) {
      result = 0;
    } else {
      uint64_t inode = inode_of(path);
      result = (int)syscall(SYS_unlinkat, directory, name, flags);
      if (!result) put(flags & AT_REMOVEDIR ? 'd' : 'u', inode, 0, 0, NULL, path, NULL);
    }
  });
  return result;
}

int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }

int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int close(int fd) {
  int result = (int)syscall(SYS_close, fd);
  for (int i = 0; nfs && i < 64; i++)
    if (kept[i].path[0] && kept[i].fd == fd) {
      syscall(SYS_unlinkat, AT_FDCWD, kept[i].path, 0);
      kept[i].path[0] = 0;
    }
  return result;
}

int linkat(int from, const char *old, int to, const char *new, int flags) {
  char first[PATH_MAX];
  char second[PATH_MAX];
  if (!path_is_ours(to, new, second) || !absolute(from, old, first))
    return (int)syscall(SYS_linkat, from, old, to, new, flags);
  int result = -1;
  LOCKED({
    if (fate_of("link") != GOES && !shortens) {
      errno = error_number;
    } else {
      result = (int)syscall(SYS_linkat, from, old, to, new, flags);
      if (!result) put('l', inode_of(second), 0, 0, NULL, first, second);
    }
  });
  return result;
}

int link(const char *old, const char *new) { return linkat(AT_FDCWD, old, AT_FDCWD, new, 0); }

/* ---- what the log cannot have, and locks ------------------------------------------------- */

void *mmap(void *address, size_t size, int protection, int flags, int fd, off_t offset) {
  char path[PATH_MAX];
  if (armed && fd >= 0 && (flags & MAP_SHARED) && (protection & PROT_WRITE) && fd_is_ours(fd, path))
    put('M', inode_of_fd(fd), 0, 0, NULL, path, NULL);
  return (void *)syscall(SYS_mmap, address, size, protection, flags, fd, offset);
}

void *mmap64(void *address, size_t size, int protection, int flags, int fd, off64_t offset) {
  return mmap(address, size, protection, flags, fd, offset);
}

static int controlled(int fd, int command, void *argument) {
  char path[PATH_MAX];
  if ((command == F_SETLK || command == F_SETLKW) && fd_is_ours(fd, path) && lock_error) {
    errno = lock_error;
    return -1;
  }
  return (int)syscall(SYS_fcntl, fd, command, argument);
}

int fcntl(int fd, int command, ...) {
  va_list more;
  va_start(more, command);
  void *argument = va_arg(more, void *);
  va_end(more);
  return controlled(fd, command, argument);
}

int fcntl64(int fd, int command, ...) {
  va_list more;
  va_start(more, command);
  void *argument = va_arg(more, void *);
  va_end(more);
  return controlled(fd, command, argument);
}

/* ---- clock ----------------------------------------------------------------------------- */

static long wrong_by(void) {
  static atomic_bool read;
  if (!atomic_load(&read) && getenv("TORTURE_CLOCK")) {
    clock_offset = number("TORTURE_CLOCK");
    clock_jump = number("TORTURE_JUMP");
    atomic_store(&read, true);
  }
  if (!clock_offset) return 0;
  long reading = atomic_fetch_add(&clock_readings, 1);
  return clock_jump && (reading / clock_jump) % 2 ? -clock_offset : clock_offset;
}

static long moved_clock(void) {
  struct timespec now;
  syscall(SYS_clock_gettime, CLOCK_REALTIME, &now);
  return now.tv_sec + wrong_by();
}

int clock_gettime(clockid_t clock, struct timespec *found) {
  int result = (int)syscall(SYS_clock_gettime, clock, found);
  if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
    found->tv_sec += wrong_by();
  return result;
}

time_t time(time_t *found) {
  time_t now = moved_clock();
  if (found) *found = now;
  return now;
}

int gettimeofday(struct timeval *found, void *zone) {
  int result = (int)syscall(SYS_gettimeofday, found, zone);
  if (!result) found->tv_sec += wrong_by();
  return result;
}
