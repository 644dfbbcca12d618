/* adapted.h - what LoRA, and keeping what a backward needs, add to the steps of the forward. */
#ifndef KT_ADAPTED_H
#define KT_ADAPTED_H

#include "rows_view.h"
#include "saved.h"

/* Of a call; nothing of it is touched where `lora` is NULL and `saves` 0. */
typedef struct kt_adapted {
  kt_adapter adapter;
  int saves;
  kt_saved saved;
  uint8_t *x_rows; /* [tokens] bf16 rows of x, where the format's are others */
  uint16_t *pairs; /* [slots] rows [gate | up] of A x, times factor */
  float *values;   /* [slots][2 rank] the same as numbers, where they are not saved */
  int64_t x_stride;
  float gate_cut, up_cut; /* magnitudes from which a clamp makes the derivative 0 */
  kt_share rows, experts;
} kt_adapted;

/* Of a team, for one part at a time. */
typedef struct kt_adapted_team {
  uint8_t *middle; /* [slots] bf16 rows of the middle, where the format's are others */
  uint16_t *rows;  /* [slots] rows of A h, times factor */
  float *values;   /* [slots][rank] */
  int64_t stride;  /* of middle */
} kt_adapted_team;

void kt_take_adapted(kt_arena *arena, const kt_run *run, int64_t slots, kt_adapted *adapted);
void kt_take_adapted_team(kt_arena *arena, const kt_run *run, const kt_adapted *adapted,
                          int64_t slots, kt_adapted_team *team);
void kt_take_lora_worker(kt_arena *arena, const kt_run *run, const kt_adapter *adapter,
                         kt_lora_worker *worker);

/* Of a call that saves: gate and up are rounded, but not across where a derivative jumps. */
void kt_adapted_cuts(kt_adapted *adapted, const kt_activation *activation);

/* Before the job of a batch. */
void kt_adapted_start(const kt_run *run, kt_adapted *adapted);

/* All threads: A x of gate and up. `own`: the team's rows of x, if they are bf16. Ends with a
 * barrier of all threads. */
void kt_adapted_inputs(kt_run *run, kt_adapted *adapted, int32_t thread,
                       const kt_lora_worker *worker, const kt_matrix *x, const kt_rows_view *own,
                       float *values, uint8_t *panel);

/* What an item of gate and up rows has: strips from row `row` of a part on. */
typedef struct kt_inner_item {
  int64_t expert, part, row, strips;
} kt_inner_item;

/* Makes the strips of B of gate and up; adds their products to those of `count` slots from `slot`
 * on; stores gate and up before their function. */
void kt_adapted_inner_strips(const kt_adapted *adapted, const kt_run *run,
                             const kt_lora_worker *worker, const kt_inner_item *item);
void kt_adapted_add_inner(const kt_adapted *adapted, const kt_lora_worker *worker, uint8_t *panel,
                          kt_projection projection, const kt_inner_item *item, int64_t slot,
                          int64_t count, float *out);
void kt_adapted_stream_inner(const kt_adapted *adapted, const kt_lora_worker *worker,
                             kt_projection projection, const kt_inner_item *item, int64_t slot,
                             int64_t count, kt_beside *beside, float *out);
void kt_adapted_save_inner(const kt_adapted *adapted, const kt_run *run, kt_projection projection,
                           const kt_inner_item *item, const float *products, const float *bias,
                           int64_t slot, int64_t count);

/* What is kept of the first strip of an item. */
kt_keep kt_adapted_keep(const kt_adapted *adapted, const kt_run *run, kt_projection projection,
                        const kt_inner_item *item, const float *products, const float *bias,
                        int64_t slot, int64_t count);

/* A slot's row of the middle: bf16 where needed, and codes and scales of `row`, the format's own.
 * before: slots before those that the team has rows of. */
void kt_adapted_middle(const kt_adapted *adapted, const kt_run *run, const kt_adapted_team *team,
                       int64_t part, int64_t slot, int64_t before, const float *middle,
                       const uint8_t *row);

/* A h of slots of an expert; `own` as above. */
void kt_adapted_down_rows(const kt_adapted *adapted, const kt_run *run, const kt_adapted_team *team,
                          const kt_lora_worker *worker, const kt_rows_view *own, uint8_t *panel,
                          int64_t part, int64_t active, int64_t slot, int64_t count);

/* As for gate and up, of `strips` from row `row` of down on; `at`: the first row of the team's. */
void kt_adapted_down_strips(const kt_adapted *adapted, const kt_lora_worker *worker, int64_t expert,
                            int64_t row, int64_t strips);
void kt_adapted_add_down(const kt_adapted *adapted, const kt_adapted_team *team,
                         const kt_lora_worker *worker, uint8_t *panel, int64_t strips, int64_t at,
                         int64_t count, float *out);
void kt_adapted_stream_down(const kt_adapted *adapted, const kt_adapted_team *team,
                            const kt_lora_worker *worker, int64_t at, int64_t count,
                            kt_beside *beside, float *out);

#endif
