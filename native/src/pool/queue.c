/* A thread that runs tasks in order. Who starts a task, and who waits for one, may be a thread of
 * CUDA that runs host functions: nothing here waits for anything but the queue's own thread. */
#define _POSIX_C_SOURCE 200809L
#include "ktconv.h"
#include "turn.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

struct kt_queue {
  pid_t owner; /* a child process (fork) has the memory, but not the thread */
  pthread_t thread;
  pthread_mutex_t lock; /* of the list, of the counts of tasks, and of who counts `come` up */
  kt_task *first, *last;
  int64_t started, done; /* of all tasks */
  int ends;
  kt_turn come, over; /* tasks started, tasks done */
};

static kt_task *take_first(kt_queue *queue, int *ends) {
  pthread_mutex_lock(&queue->lock);
  kt_task *first = queue->first;
  if (first) queue->first = first->next;
  *ends = queue->ends;
  pthread_mutex_unlock(&queue->lock);
  return first;
}

/* The task may be gone once the lock is free. */
static void count_done(kt_queue *queue, kt_task *task) {
  pthread_mutex_lock(&queue->lock);
  task->done++;
  queue->done++;
  pthread_mutex_unlock(&queue->lock);
  kt_turn_next(&queue->over);
}

static void *run_tasks(void *argument) {
  kt_queue *queue = argument;
  for (;;) {
    const unsigned turn = kt_turn_now(&queue->come);
    int ends;
    kt_task *task = take_first(queue, &ends);
    if (task) {
      task->run(task->context);
      count_done(queue, task);
    } else if (ends) {
      return NULL;
    } else {
      kt_turn_wait(&queue->come, turn);
    }
  }
}

kt_status kt_queue_create(kt_queue **queue) {
  if (!queue) return KT_ERR_ARGUMENT;
  kt_queue *made = calloc(1, sizeof *made);
  if (!made) return KT_ERR_THREADS;
  made->owner = getpid();
  kt_turn_init(&made->come);
  kt_turn_init(&made->over);
  sigset_t all, before;
  sigfillset(&all);
  for (int i = 0; i < 2; i++) sigdelset(&all, i ? SIGSEGV : SIGBUS); /* of mapped files */
  if (pthread_mutex_init(&made->lock, NULL) != 0) {
    free(made);
    return KT_ERR_THREADS;
  }
  pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the program's threads */
  const int failed = pthread_create(&made->thread, NULL, run_tasks, made);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (failed) {
    pthread_mutex_destroy(&made->lock);
    free(made);
    return KT_ERR_THREADS;
  }
  *queue = made;
  return KT_OK;
}

void kt_queue_destroy(kt_queue *queue) {
  if (!queue) return;
  if (queue->owner == getpid()) {
    pthread_mutex_lock(&queue->lock);
    queue->ends = 1;
    kt_turn_next(&queue->come);
    pthread_mutex_unlock(&queue->lock);
    pthread_join(queue->thread, NULL);
    pthread_mutex_destroy(&queue->lock); /* elsewhere it may be locked for ever */
  }
  free(queue);
}

/* Waits until *done, which the lock guards, is `target`; keeps the lock. */
static void wait_until(kt_queue *queue, const int64_t *done, int64_t target) {
  for (;;) {
    const unsigned turn = kt_turn_now(&queue->over);
    pthread_mutex_lock(&queue->lock);
    if (*done >= target) return;
    pthread_mutex_unlock(&queue->lock);
    kt_turn_wait(&queue->over, turn);
  }
}

void kt_queue_drain(kt_queue *queue) {
  pthread_mutex_lock(&queue->lock);
  const int64_t target = queue->started;
  pthread_mutex_unlock(&queue->lock);
  wait_until(queue, &queue->done, target);
  pthread_mutex_unlock(&queue->lock);
}

void kt_task_start(void *argument) {
  kt_task *task = argument;
  kt_queue *queue = task->queue;
  for (;;) {
    pthread_mutex_lock(&queue->lock);
    const int64_t before = task->started;
    if (task->done >= before) break;
    pthread_mutex_unlock(&queue->lock);
    wait_until(queue, &task->done, before);
    pthread_mutex_unlock(&queue->lock);
  }
  task->next = NULL;
  if (queue->first)
    queue->last->next = task;
  else
    queue->first = task;
  queue->last = task;
  task->started++;
  queue->started++;
  kt_turn_next(&queue->come);
  pthread_mutex_unlock(&queue->lock);
}

void kt_task_wait(void *argument) {
  kt_task *task = argument;
  kt_queue *queue = task->queue;
  pthread_mutex_lock(&queue->lock);
  const int64_t target = task->started;
  pthread_mutex_unlock(&queue->lock);
  wait_until(queue, &task->done, target);
  task->waited++;
  pthread_mutex_unlock(&queue->lock);
}

void kt_task_counts(const kt_task *task, int64_t *started, int64_t *done, int64_t *waited) {
  pthread_mutex_lock(&task->queue->lock);
  if (started) *started = task->started;
  if (done) *done = task->done;
  if (waited) *waited = task->waited;
  pthread_mutex_unlock(&task->queue->lock);
}

void kt_flag_raise(void *flag) { __atomic_store_n((int32_t *)flag, 1, __ATOMIC_RELEASE); }
