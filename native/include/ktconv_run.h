/* ktconv_run.h - what computes with packed weights: threads, the forward of a layer, routers,
 * fine-tuning, and limits of the machine. Part of ktconv.h. */
#ifndef KTCONV_RUN_H
#define KTCONV_RUN_H

#include "ktconv_convert.h"

#ifdef __cplusplus
extern "C" {
#endif

/* cffi reads the text between the two markers. */
/* --- begin cffi --- */

/* ---- Threads --------------------------------------------------------------- */

/* Threads that wait for work. Creating a pool allocates and starts threads; running a job
 * does neither. The calling thread is thread 0 of every job, so a pool of one has no threads
 * of its own. Calls from several threads at once are done one after the other; different
 * pools know nothing of one another. Waiting threads yield their CPU at once and sleep after
 * half a millisecond, so a machine that is busy with other things, or with more threads than
 * CPUs, is slowed down as little as it slows down the job. */
typedef struct kt_pool kt_pool;

/* cpus: NULL, or [threads] the logical CPU of each thread, -1 for any; one that does not exist
 * or is not for this process counts as -1. The caller itself is moved to cpus[0] only while it
 * works, and only if there are several nodes; on a busy machine it has short time slices
 * meanwhile. nodes: NULL (all 0), or [threads] NUMA nodes
 * counted 0, 1, ... in ascending order, none left out.
 * KT_ERR_ARGUMENT: another order, a CPU beyond 8191, threads not 1..4096. KT_ERR_THREADS: no
 * memory, or the system does not allow so many threads. */
kt_status kt_pool_create(int32_t threads, const int32_t *cpus, const int32_t *nodes,
                         kt_pool **pool);
void kt_pool_destroy(kt_pool *pool);          /* no call may be in progress; NULL is fine */
int32_t kt_pool_threads(const kt_pool *pool); /* of NULL: 0, as are its nodes */
int32_t kt_pool_nodes(const kt_pool *pool);

/* Runs a job that does nothing, `times` times: the cost of a job. KT_ERR_THREADS in a child
 * of the process that created the pool, as for every job. */
kt_status kt_pool_empty(kt_pool *pool, int64_t times);

/* ---- Memory on NUMA nodes -------------------------------------------------- *
 *
 * Nodes have the system's numbers. What belongs to a range is its whole pages, of the system's
 * usual size: those that neighbours share with it stay where they are. No call needs rights
 * beyond those of its process, and none changes what the memory contains. */

typedef struct kt_range {
  const void *memory;
  size_t size; /* bytes */
} kt_range;

/* What kt_memory_gather found and did, in pages. */
typedef struct kt_gathered {
  int64_t pages;  /* of the ranges */
  int64_t local;  /* ... that lie on the node now */
  int64_t moved;  /* ... of these, that it has moved */
  int64_t shared; /* not moved: other processes have mapped them, too */
  int64_t busy;   /* not moved: the system uses them, or cannot move pages of this file */
  int64_t full;   /* not moved: the node has no memory left */
  int32_t error;  /* errno of the system call as a whole: EPERM where a container forbids it, ENODEV
                     for a node that is not for this process, ENOSYS without NUMA; else 0 */
} kt_gathered;

/* Asks for pages to be on a node: now if they exist, else once they are touched. Memory of other
 * nodes is taken where this one has none left. KT_ERR_UNSUPPORTED where the system refuses: pages
 * lie where the thread runs that writes to them first. */
kt_status kt_memory_bind(void *memory, size_t size, int32_t os_node);

/* Pages by node: nodes[n] is how many lie on node n < count, *elsewhere how many are in no memory
 * or on a higher node. KT_ERR_UNSUPPORTED where the system does not say. */
kt_status kt_memory_nodes(const kt_range *ranges, int64_t range_count, int64_t *nodes,
                          int32_t count, int64_t *elsewhere);

/* Reads every page from the calling thread, which should run on the node: those of a file that is
 * in no memory yet come to it, read ahead. Then asks the system to move the others there, which
 * it does for pages that no other process has mapped. KT_OK whatever the system has refused. */
kt_status kt_memory_gather(const kt_range *ranges, int64_t range_count, int32_t os_node,
                           kt_gathered *gathered);

/* Gives every page of new memory to the process now, zeroed, by the calling thread; it begins with
 * a page. KT_ERR_UNSUPPORTED where there is no room for all (huge pages beyond what a container may
 * have, say), in place of the SIGBUS of a later write, where some pages may be there then; and
 * where the system has no such call (Linux before 5.14). */
kt_status kt_memory_populate(void *memory, size_t size);

/* The process's policy (numactl): nodes[n], n < count, is 1 where its memory may come from node n.
 * KT_ERR_UNSUPPORTED where the system does not say. */
kt_status kt_memory_allowed(uint8_t *nodes, int32_t count);

/* ---- MoE forward --------------------------------------------------------- */

enum { KT_MAX_COLS = 32768 }; /* of a matrix that the kernels multiply with */

/* Whether the kernels multiply with packed matrices of this layout and shape: KT_OK, else as
 * kt_pack; KT_ERR_SHAPE also for more than KT_MAX_COLS columns. */
kt_status kt_product_check(const kt_layout *layout, int64_t rows, int64_t cols);

/* Whether kt_moe_forward has code of its own for this layout at level `isa`; 0: it runs the same
 * as at the next lower level, or there is no such level or no kernel for the layout. */
int kt_moe_has_kernels(const kt_layout *layout, int isa);

/* Experts have a gate matrix where the formula has a g, or a gate. */
typedef enum kt_gate_function {
  KT_SWIGLU = 0,           /* h = g * sigmoid(alpha * g) * (u + beta) */
  KT_GELU = 1,             /* h = g * (1 + erf(g / sqrt(2))) / 2 * u */
  KT_GELU_TANH = 2,        /* h = g * sigmoid(sqrt(8 / pi) * (g + 0.044715 g^3)) * u */
  KT_RELU2 = 3,            /* h = max(u, 0)^2 */
  KT_SWIGLU_CLAMPED = 4,   /* h = min(gate * sigmoid(gate), limit) * u: the gate is not cut */
  KT_SOFTCAP = 5,          /* h = alpha * tanh(g / alpha) * sigmoid(g) * (beta * tanh(u / beta)) */
  KT_RELU = 6,             /* h = max(u, 0) */
  KT_UNGATED_GELU = 7,     /* h = u * (1 + erf(u / sqrt(2))) / 2 */
  KT_UNGATED_GELU_TANH = 8 /* h = u * sigmoid(sqrt(8 / pi) * (u + 0.044715 u^3)) */
} kt_gate_function;

/* 1 if experts of this function have a gate matrix, 0 if not, -1 for a number that is none. */
int kt_function_has_gate(int function);

/* g = min(gate, limit), u = clamp(up, -limit, limit) first, then the function, in binary32. A NaN
 * of gate or up makes h NaN. limit >= 0; INFINITY: none. Functions without alpha and beta in their
 * formula do not look at them. KT_SOFTCAP wants both above 0; INFINITY: g or u itself.
 *   SiLU models                  {KT_SWIGLU, 1, 0, INFINITY}
 *   DeepSeek-V4 and others       {KT_SWIGLU, 1, 0, limit}
 *   gpt-oss, MiniMax-M3          {KT_SWIGLU, 1.702, 1, 7}
 *   Nemotron-3                   {KT_RELU2, 0, 0, INFINITY}
 *   nomic-embed-text-v2-moe      {KT_UNGATED_GELU, 0, 0, INFINITY}
 *   Step-3.7                     {KT_SWIGLU_CLAMPED, 0, 0, limit}
 *   Kimi-K3 (situ)               {KT_SOFTCAP, 4, 25, INFINITY} */
typedef struct kt_activation {
  int32_t function; /* kt_gate_function */
  float alpha, beta, limit;
} kt_activation;

/* One expert of one part. Bias pointers may be NULL. With w = intermediate / parts:
 * gate and up [w, hidden], down [hidden, w], bias of gate and up [w], of down [hidden]
 * (the down bias of part 0 is used, those of other parts must be NULL). Codes need no
 * alignment, scales and biases that of their type. Where the layer's function has no gate, the
 * three pointers of gate are NULL. */
typedef struct kt_expert {
  const void *gate, *up, *down;
  const void *gate_scale, *up_scale, *down_scale;
  const float *gate_bias, *up_bias, *down_bias;
} kt_expert;

typedef struct kt_moe {
  kt_layout layout;
  kt_activation activation;
  int64_t hidden, intermediate, experts, parts;
  const kt_expert *expert; /* [parts][experts] */
} kt_moe;

/* Bytes of scratch of kt_moe_forward for up to `tokens` tokens; it does not grow beyond
 * those of 2048 tokens, and is the same for 0 and 1. 0 if an argument is impossible. */
size_t kt_moe_scratch_size(const kt_moe *moe, int64_t tokens, int64_t top_k, const kt_pool *pool);

/* One call of a layer:
 *   y[t] = add[t] + sum over k of weights[t][k] * expert[ids[t][k]](x[t])
 * x and y may be KT_BF16, KT_F16 or KT_F32, each on its own. x is rounded to bf16 first, ties to
 * even; sums are binary32, and rounded to y's dtype once. Arrays are aligned to their types.
 * y may be x or add where the dtypes are the same, else it overlaps nothing that is read. What is
 * read must not change before the call returns; ids least of all, which are read several times. */
typedef struct kt_moe_call {
  int64_t tokens, top_k; /* any number of tokens; of none, no array is looked at; top_k < 2^20 */
  const void *x;         /* [tokens, hidden] */
  const void *ids;       /* [tokens, top_k] */
  const float *weights;  /* [tokens, top_k] */
  const uint8_t *skip;   /* NULL, or [experts]: those that are not 0 count as not chosen; read once,
                            at the start of the call */
  const float *add;      /* NULL: zeros; else [tokens, hidden] */
  void *y;               /* [tokens, hidden] */
  int32_t id_size;       /* bytes of an id: 4 (int32) or 8 (int64) */
  int32_t x_dtype, y_dtype;
} kt_moe_call;

/* Ids that are no expert's, below 0 or from `experts` on, are skipped: such an expert lives
 * elsewhere. An expert that a token names twice counts twice. Experts without tokens cost nothing.
 * Sums run over experts in ascending order, then over parts, of which the first begins with `add`;
 * results have the same bits for any number of threads, any placement, and whatever other tokens
 * are in the batch (for AMX levels of float formats: up to where the kernel switches from one loop
 * to another). Results of INT8, INT4, GINT4 and GINT8 are the same on every level.
 * scratch: 64-byte aligned, one for each call in progress. On a pool of several nodes it is cut
 * into equal regions, as many as there are nodes, or parts if they are fewer: each is written to by
 * the threads of its nodes, and should lie there. A region is whole pages of 4 KiB, or of 2 MiB if
 * it has room for one. Calls from several threads may use one pool (they are done one after the
 * other) and one layer.
 * KT_ERR_EXPERT: a token goes to an expert whose pointers are NULL, and which is not to be skipped.
 * KT_ERR_ARGUMENT: also a pointer that is not aligned to its type, a number that kt_activation does
 * not allow, a down bias of another part than 0, a gate where the function has none. */
kt_status kt_moe_forward(const kt_moe *moe, kt_pool *pool, const kt_moe_call *call, void *scratch,
                         size_t scratch_size);

/* The first of the pool's nodes, counted from 0, whose threads compute a part of a layer cut into
 * `parts`: its weights should lie there. -1 if there is no such part. */
int32_t kt_moe_part_node(int64_t parts, int64_t part, const kt_pool *pool);

/* Reads one byte of each page of the weights, by the threads that will use them: pages of
 * a mapped file that are not in memory yet come to the right NUMA node. */
kt_status kt_moe_touch(const kt_moe *moe, kt_pool *pool);

/* ---- Routers --------------------------------------------------------------- *
 *
 * What a router does with its logits: which experts each token goes to, and with what weights. */

enum { KT_MAX_ROUTED = 4096 }; /* logits of a token */

/* The score s of a logit z. */
typedef enum kt_scoring {
  KT_SOFTMAX = 0,      /* exp(z - m) / sum of exp(z - m) over the experts; m is the largest z */
  KT_SIGMOID = 1,      /* 1 / (1 + exp(-z)) */
  KT_SQRT_SOFTPLUS = 2 /* sqrt(log(1 + exp(z))) */
} kt_scoring;

/* Experts are chosen by c = s + correction, or z + correction with `by_logits`. With `groups` > 1,
 * groups of experts / groups neighbours, a group's mark is the sum of its group_score (1 or 2) best
 * c (of a group of one: its c). Experts outside the `keep` best groups cannot be chosen, or compete
 * with c = `masked` where that is not -INFINITY. The weight of a chosen expert is its s, without
 * the correction; with `by_logits`, softmax is over the chosen experts alone. Then, in this order:
 *   renormalise    s / max(norm + epsilon, least_sum), or 0 where that divisor is 0
 *   factor         times factor
 *   expert_factor  times the chosen expert's
 * norm is the p-norm of the chosen s and of the scores of the sinks: the last `sinks` logits of a
 * token, which are no experts and count nowhere else. Softmax has none; with KT_SIGMOID, scores too
 * small for binary32 still have their shares.
 *
 * `jitter` >= 0 is SparseMixer-v2 (arXiv 2409.12136): the best expert, then the best of the others,
 * and so on. A weight is the expert's share of the softmax over it and those worse ones that have
 * (best - z) / max(|z|, best) <= 2 * jitter. It takes KT_SOFTMAX, one group, and neither
 * correction, sinks, by_logits nor renormalise. */
typedef struct kt_router {
  int64_t experts, sinks, top_k; /* together at most KT_MAX_ROUTED logits */
  int32_t scoring;               /* kt_scoring */
  int32_t by_logits;
  const float *correction; /* NULL: zeros; else [experts] */
  int64_t groups, keep;    /* 1, 1: all experts */
  int32_t group_score;
  int32_t renormalise;
  float masked;
  float jitter; /* below 0: none */
  float p_norm; /* above 0; 1: sum, 2: Euclidean, INFINITY: largest; others by pow() */
  float epsilon, least_sum, factor;
  const float *expert_factor; /* NULL: ones; else [experts] */
} kt_router;

/* Experts of each token and their weights.
 *   logits   float [tokens, experts + sinks]
 *   given    NULL, or int64 [tokens, top_k] experts that are not to be chosen, only weighed
 *   ids      int64 [tokens, top_k] out: best first and all different, or as given; may be `given`
 *   weights  float [tokens, top_k] out
 *   pool     NULL: the calling thread
 * Of equal c, and of equal groups, the lowest number is chosen. NaN counts as -INFINITY there, and
 * all weights of a token with a NaN logit are NaN, as are those whose arithmetic gives NaN, such as
 * softmax of logits of which one is INFINITY or all are -INFINITY. All operations are binary32 (the
 * norm: binary64) and spelled out: the same bits on every level and for any number of threads,
 * except where p_norm needs pow(). tokens: any number. KT_ERR_ARGUMENT: sizes that do not fit each
 * other (groups that do not divide the experts, top_k above what the kept groups have), a number
 * that is NaN or outside its range, sinks of a softmax, and what jitter does not take, `given`
 * among it. KT_ERR_EXPERT: an id in `given` that is not one of 0 .. experts - 1. */
kt_status kt_choose_experts(const kt_router *router, kt_pool *pool, int64_t tokens,
                            const float *logits, const int64_t *given, int64_t *ids,
                            float *weights);

/* ---- Fine-tuning ------------------------------------------------------------ *
 *
 * LoRA on the experts: each matrix W counts as W + scale * B A. Formulas of the backward:
 * docs/fine-tuning.md. */

enum { KT_MAX_RANK = 1024 };

/* Six matrices per expert; both of a pair may be NULL: that matrix has none. Elements are dtype,
 * KT_BF16 or KT_F32, the latter rounded to bf16 where they are multiplied. */
typedef struct kt_lora {
  int64_t rank;              /* 1 .. KT_MAX_RANK */
  const void *gate_a, *up_a; /* [experts, rank, hidden] */
  const void *gate_b, *up_b; /* [experts, intermediate, rank] */
  const void *down_a;        /* [experts, rank, intermediate] */
  const void *down_b;        /* [experts, hidden, rank] */
  uint64_t seed;             /* of dropout */
  float scale;               /* alpha / rank; finite, also divided by 1 - dropout */
  float dropout;             /* 0 <= dropout < 1: the chance of each element that A reads to be 0,
                                all others are divided by 1 - dropout */
  int32_t dtype;
} kt_lora;

/* Bytes that a forward saves for the backward, and of scratch of either for up to `tokens` tokens.
 * 0 if an argument is impossible. lora may be NULL. */
size_t kt_train_saved_size(const kt_moe *moe, const kt_lora *lora, int64_t tokens, int64_t top_k);
size_t kt_train_scratch_size(const kt_moe *moe, const kt_lora *lora, int64_t tokens, int64_t top_k,
                             const kt_pool *pool);

/* kt_moe_forward with LoRA (NULL: the same bits as kt_moe_forward). saved: NULL, or
 * kt_train_saved_size() bytes, 64-byte aligned, for one backward or several: gate and up before
 * their function, in bf16, A x and A h, and where products read int8, the codes of h. call->add
 * must be NULL. LoRA reads x and the middle in bf16; A x is rounded to bf16, products are summed in
 * binary32. With LoRA, AMX multiplies integers in groups of up to 64 columns as bf16: codes times
 * scales, rounded, by activations that are not quantized. What is saved is for the same level. */
kt_status kt_train_forward(const kt_moe *moe, const kt_lora *lora, kt_pool *pool,
                           const kt_moe_call *call, void *saved, void *scratch,
                           size_t scratch_size);

/* Gradients of a forward. Each pointer but dy may be NULL: not wanted. What is wanted is
 * overwritten, with zeros for experts without tokens and for skipped ids; sums are binary32, in an
 * order that does not depend on threads. */
typedef struct kt_moe_gradients {
  const void *dy;                      /* [tokens, hidden]; rounded to bf16 first */
  void *dx;                            /* [tokens, hidden], rounded once */
  float *dweights;                     /* [tokens, top_k] */
  void *gate_a, *gate_b, *up_a, *up_b; /* of the LoRA matrices, in their shapes */
  void *down_a, *down_b;
  float *gate, *up, *down;    /* of the weights: [experts, intermediate, hidden], the same,
                                 [experts, hidden, intermediate]; KT_FORMAT_BF16 only */
  int32_t dy_dtype, dx_dtype; /* KT_BF16, KT_F16 or KT_F32 */
  int32_t lora_bf16; /* 0: gradients of LoRA matrices are binary32; 1, for matrices of bf16:
                        the same numbers, rounded once to bf16 */
} kt_moe_gradients;

/* moe, lora (its matrices unchanged) and call are those of the forward that has filled `saved`;
 * call->y is not looked at. The gradient is that of the weights that the forward has multiplied
 * with, and rounding counts as the identity. KT_ERR_ARGUMENT also where a gradient of LoRA is
 * wanted whose matrices are not there, or lora_bf16 where they are not of bf16. */
kt_status kt_train_backward(const kt_moe *moe, const kt_lora *lora, kt_pool *pool,
                            const kt_moe_call *call, const void *saved,
                            const kt_moe_gradients *gradients, void *scratch, size_t scratch_size);

/* ---- LoRA at inference --------------------------------------------------------- *
 *
 * Adapters that stay beside the packed weights: in an expert, for a token with an adapter, each
 * matrix W counts as W + scale * B A. Any number of adapters may serve one call, each of its tokens
 * by one or by none. */

/* The matrices of LoRA of one matrix [outputs, inputs], packed by kt_lora_pack: A [rank, inputs]
 * and B [outputs, rank]. Both have numbers in bf16. rank 0: there are none, and nothing else
 * counts. */
typedef struct kt_lora_pair {
  const void *a, *b;
  float scale; /* finite */
  int32_t rank;
} kt_lora_pair;

typedef struct kt_adapters {
  int64_t count;
  int64_t rank;             /* 1 .. KT_MAX_RANK, which no pair exceeds; scratch grows with it */
  const kt_lora_pair *pair; /* [count][experts][3]: gate, up and down of all parts together */
  const int32_t *of_token;  /* NULL: all tokens have adapter `all`; else [tokens] */
  int32_t all;              /* an adapter is one of 0 .. count - 1; -1: none */
} kt_adapters;

/* Bytes of a packed matrix: 16 rows x 2 columns side by side, both rounded up to whole ones. 0 for
 * sizes that are not above 0, or too large. */
size_t kt_lora_packed_size(int64_t rows, int64_t cols);

/* Packs a plain matrix of dtype KT_BF16 or KT_F32 [rows, cols], whose numbers are rounded to bf16,
 * ties to even. KT_ERR_ARGUMENT: another dtype, sizes or an alignment that cannot be. */
kt_status kt_lora_pack(int32_t dtype, const void *matrix, int64_t rows, int64_t cols, void *packed);

size_t kt_adapted_scratch_size(const kt_moe *moe, const kt_adapters *adapters, int64_t tokens,
                               int64_t top_k, const kt_pool *pool);

/* kt_moe_forward, the products of LoRA added to those of the packed weights before biases and
 * function. As in fine-tuning, x, the middle and scale * A times them are rounded to bf16 before A
 * or B reads them; sums are binary32 (native/src/lora/slabs.h), and their bits are the same on
 * every level, for any number of threads and whatever other tokens and adapters are in the batch. A
 * token without an adapter has the bits of kt_moe_forward. KT_ERR_ARGUMENT: also an adapter of a
 * token that does not exist, and, where tokens need it, a pair that cannot be. */
kt_status kt_adapted_forward(const kt_moe *moe, const kt_adapters *adapters, kt_pool *pool,
                             const kt_moe_call *call, void *scratch, size_t scratch_size);

/* ---- Outside the experts ------------------------------------------------------ *
 *
 * What else a model computes for a token, or for few: arrays are bf16, in the order of the shapes,
 * sums binary32, rounded to nearest, ties to even. The same bits on every level and for any number
 * of threads, but which NaN a NaN is. y overlaps nothing that is read. */

/* Whether the level in use has code of its own for what follows; 0: the reference runs. */
int kt_dense_is_fast(void);

/* A linear layer. */
typedef struct kt_linear {
  int64_t rows, cols;
  const void *weight; /* [rows, cols] */
  const void *bias;   /* NULL, or [rows] */
} kt_linear;

/* y [tokens, rows] = x [tokens, cols] times the transposed weight, plus bias. Weights are read once
 * for up to 16 tokens. KT_ERR_ARGUMENT: sizes below 1, a NULL, arrays that are not aligned. */
kt_status kt_linear_forward(const kt_linear *linear, kt_pool *pool, int64_t tokens, const void *x,
                            void *y);

/* y = x r weight, with r = 1 / sqrt(mean of x^2 + epsilon) of a row; what is rounded on the way: */
typedef enum kt_norm_kind {
  KT_NORM_ROUNDED = 0, /* x r, then its product with the weight */
  KT_NORM_ONCE = 1,    /* the whole, once */
  KT_NORM_PLUS_ONE = 2 /* the whole, once; weights count as 1 + weight */
} kt_norm_kind;

typedef struct kt_norm {
  int64_t cols;
  const void *weight; /* [cols] */
  float epsilon;      /* at least 0 */
  int32_t kind;       /* kt_norm_kind */
} kt_norm;

/* x and y [rows, cols]; y may be x. By the calling thread. KT_ERR_ARGUMENT: as above, and a kind
 * that does not exist. */
kt_status kt_rms_norm(const kt_norm *norm, int64_t rows, const void *x, void *y);

/* Rotary embedding of one token: with h = cols / 2, y[i] = x[i] cosine[i] - x[i + h] sine[i] for i
 * < h, else x[i] cosine[i] + x[i - h] sine[i]; both products are rounded, then their sum. x and y
 * [heads, cols], cosine and sine [cols]. By the calling thread. */
kt_status kt_rotate(int64_t heads, int64_t cols, const void *x, const void *cosine,
                    const void *sine, void *y);

/* Attention of one token. With n = heads / key_heads, head h has the keys and values of head h / n:
 *   y[h] = sum over tokens t of softmax(scale * queries[h] . keys[t])[t] * values[t]
 * Key t of head k is at keys + k * key_head + t * key_token elements, values alike. Weights of
 * softmax are not rounded. */
typedef struct kt_attention {
  int64_t heads, key_heads, cols, value_cols, tokens; /* cols and value_cols up to 1024 */
  int64_t key_head, key_token, value_head, value_token;
  const void *queries, *keys, *values; /* queries [heads, cols] */
  void *y;                             /* [heads, value_cols] */
  float scale;                         /* finite, above 0 */
} kt_attention;

/* Bytes of scratch, aligned as floats; 0 for sizes that cannot be. */
size_t kt_attention_scratch_size(const kt_attention *attention);

/* KT_ERR_ARGUMENT: sizes or a scale that cannot be, a NULL, arrays that are not aligned. */
kt_status kt_attend(const kt_attention *attention, kt_pool *pool, void *scratch,
                    size_t scratch_size);

/* A decoder layer of one token up to its experts:
 *   n = before(x); q, k, v = linear layers of n, q and k normed where there are norms, and rotated
 *   h = x + out(attention of q to all keys and values, k and v the last of them), rounded
 *   normed = after(h) */
typedef struct kt_attention_layer {
  kt_norm before, after;
  kt_norm query_norm, key_norm; /* of each head, or of all as one row; without a weight: none */
  kt_linear projection[3];      /* of query, key and value */
  kt_linear out;
  int64_t key_heads, cols; /* of a head */
  float scale;
} kt_attention_layer;

/* One call of it. Keys and values of head k have `room` tokens, [key_heads, room, cols], of which
 * `tokens` are there; this one is written behind them. */
typedef struct kt_attention_step {
  const void *x;             /* [hidden] */
  const void *cosine, *sine; /* [cols] */
  void *keys, *values;
  int64_t tokens, room;
  void *h, *normed; /* [hidden] */
} kt_attention_step;

/* Bytes of scratch, 64-byte aligned, for a step with so many tokens; 0 for sizes that cannot be. */
size_t kt_attention_layer_scratch_size(const kt_attention_layer *layer, int64_t tokens);

/* KT_ERR_ARGUMENT: sizes that do not fit each other, no room, a NULL, arrays not aligned. */
kt_status kt_attention_layer_run(const kt_attention_layer *layer, kt_pool *pool,
                                 const kt_attention_step *step, void *scratch, size_t scratch_size);

/* The rest of the layer: y = h + the experts that the router chooses by its product with normed;
 * product and sum of the experts are rounded to bf16. Where `rounded` is not 0, weights are rounded
 * to bf16 first. */
typedef struct kt_routed_layer {
  kt_linear gate; /* [experts, hidden] */
  kt_router router;
  const kt_moe *moe;
  const uint8_t *skip; /* as kt_moe_call's */
  int32_t rounded;
} kt_routed_layer;

/* Scratch is that of kt_moe_forward for one token. KT_ERR_ARGUMENT, KT_ERR_EXPERT: as there, as
 * kt_choose_experts, and for sizes that do not fit each other. */
kt_status kt_routed_layer_run(const kt_routed_layer *layer, kt_pool *pool, const void *normed,
                              const void *h, void *y, void *scratch, size_t scratch_size);

/* Decoder layers one behind the other, of one hidden size. */
typedef struct kt_decoder_layer {
  const kt_attention_layer *attention;
  const kt_routed_layer *routed;
} kt_decoder_layer;

/* Bytes of scratch, 64-byte aligned, for steps with up to so many tokens; 0 for layers and sizes
 * that cannot be. */
size_t kt_decoder_layers_scratch_size(const kt_decoder_layer *layer, int64_t count, int64_t tokens,
                                      const kt_pool *pool);

/* Both calls of each of `count` layers, to the bit. y [count, hidden] has the output of each, which
 * is the next one's x: only that of step[0] is read. Steps may share h and normed. `expert_ns`:
 * what kt_moe_forward took of it, in nanoseconds. Layers that cannot be are refused before the
 * first runs; after another error keys, values and outputs of those before are there. */
kt_status kt_decoder_layers_run(const kt_decoder_layer *layer, int64_t count, kt_pool *pool,
                                const kt_attention_step *step, void *y, int64_t *expert_ns,
                                void *scratch, size_t scratch_size);

/* ---- Work that streams start ---------------------------------------------------- *
 *
 * A CUDA stream starts a task by one host function and waits for it by another: kt_task_start and
 * kt_task_wait have the type of cuLaunchHostFunc's. Neither calls CUDA, allocates, or needs
 * anything of an interpreter. A graph that has them repeats the work with what memory has then. */

typedef struct kt_queue kt_queue; /* a thread that runs tasks one after the other */

/* KT_ERR_THREADS: no memory, or the system does not allow another thread. */
kt_status kt_queue_create(kt_queue **queue);
/* First waits for all that was started. In a child process (fork), which has not the thread, only
 * frees memory. NULL is fine. */
void kt_queue_destroy(kt_queue *queue);
void kt_queue_drain(kt_queue *queue); /* waits for all that was started before */

typedef struct kt_task {
  kt_queue *queue;
  void (*run)(void *context);
  void *context;
  struct kt_task *next; /* the library's, as what follows: zeros at first */
  int64_t started, done, waited;
} kt_task;

/* Lets the queue run the task after all that was started before. One that has not run since it was
 * last started is waited for first, so that it runs as often as it is started. */
void kt_task_start(void *task);
/* Returns once the task has run as often as it was started by then. */
void kt_task_wait(void *task);
/* Of a task: how often it was started, was done, and kt_task_wait has returned. NULL for those that
 * are not asked for. Its memory may go once they are as many as will be. */
void kt_task_counts(const kt_task *task, int64_t *started, int64_t *done, int64_t *waited);

/* Sets an int32 to 1: the destructor of a CUDA user object, by which a graph tells that it is gone.
 */
void kt_flag_raise(void *flag);

/* A call of a layer as a task's work. Where `now` and `later` [tokens, top_k] are given, the
 * `keep` experts of largest weight of each token are computed, of equal weights the first, ids
 * below 0 counting as the smallest; the ids of the others go to `later`, and -1 in the place of
 * each to `now`. */
typedef struct kt_moe_work {
  const kt_moe *moe;
  const kt_adapters *adapters; /* NULL: none */
  kt_pool *pool;
  kt_moe_call call;
  void *scratch;
  size_t scratch_size;
  const uint8_t *mask; /* NULL, or [experts]: copied to `skip` when the work begins */
  uint8_t *skip;       /* [experts], which call.skip should be */
  int64_t *now, *later;
  int64_t keep;
  int32_t status;    /* kt_status of the first run that failed since it was last set to KT_OK */
  int32_t *failures; /* runs that failed, of any work that counts there; NULL: not counted */
} kt_moe_work;

/* Computes call.y of a kt_moe_work. One that fails fills y with NaN. */
void kt_moe_work_run(void *work);

/* ---- Limits of the machine ------------------------------------------------- *
 *
 * Loops to be timed by the caller; all threads of the pool work, at the level in use. */

typedef enum kt_unit {
  KT_UNIT_INT8 = 0, /* 8-bit products, 32-bit sums */
  KT_UNIT_BF16 = 1  /* bf16 products, binary32 sums */
} kt_unit;

/* Reads `size` bytes (a multiple of 1 MiB) once, each thread a part of its own, in 1 to 16
 * ascending streams: which number is fastest depends on the machine. */
kt_status kt_limit_read(kt_pool *pool, const void *memory, size_t size, int32_t streams);

/* Each thread does `rounds` times kt_limit_ops() operations (a multiply-add counts 2) on
 * registers, the fastest that the level has for that unit; scalar: plain C from L1. */
kt_status kt_limit_dot(kt_pool *pool, int unit, int64_t rounds);
int64_t kt_limit_ops(void);

/* --- end cffi --- */

#ifdef __cplusplus
}
#endif
#endif
