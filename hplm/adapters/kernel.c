/* Products of rows with the weights of their slots, which are read where they lie. groups.py calls it. */

#ifndef WIDTH
#include "../model/kernel.h"

/* As in groups.py: the inner numbers of a run stay in the cache. */
#define MOST_RANK 256
#define MOST_ROWS 60 /* a multiple of the rows of a block */

/* Rows in runs of one slot each, and the matrices of all slots, inputs x outputs, with their biases, which may be NULL.
 *
 * A rank before `up` is at most MOST_RANK. Ranks after `down` and outputs are multiples of 16. `x` may be `out`.
 */
typedef struct {
    How how;
    const float *down, *down_bias; /* NULL: there is only `up` */
    const float *up, *up_bias;
    const int64_t *starts, *slots; /* the first row of each run and the end of the last one; the slot of each */
    const float *x;
    float *out;
    int64_t inputs, rank, outputs; /* `up` has rank x outputs */
    int64_t relu, adds;            /* after `down`; whether the result is added to `out` */
    int64_t count;                 /* of runs */
    int64_t x_stride, out_stride;  /* from one row to the next */
} Maps;

static int64_t pieces_of(const Maps *maps, int64_t run) {
    return (maps->starts[run + 1] - maps->starts[run] + MOST_ROWS - 1) / MOST_ROWS;
}

#define WIDTH 8
#include "kernel.c"
#undef WIDTH
#define WIDTH 16
#include "kernel.c"
#undef WIDTH

/* Writes into each row of `out`, or adds to it: up (f (down x + down_bias)) + up_bias, with the maps of the row's slot. */
API void hplm_map(const Maps *maps) {
    How how = maps->how;
    int64_t pieces = 0;
    for (int64_t run = 0; run < maps->count; run++) pieces += pieces_of(maps, run);
    if (pieces < how.threads) how.threads = pieces;
    int64_t at_once = how.threads > 1 ? pieces / (4 * how.threads) : pieces;
    compute_all(&how, how.instructions == 2 ? map_pieces_16 : map_pieces_8, maps, pieces, at_once ? at_once : 1);
}

#else
#include "../model/product.h"

static void AT(map_rows)(const Maps *maps, int64_t slot, int64_t row, int64_t count) {
    float inner[MOST_ROWS * MOST_RANK];
    Product up = {
        maps->x + row * maps->x_stride, maps->x_stride, maps->up + slot * maps->rank * maps->outputs, maps->outputs, maps->rank,
        maps->up_bias ? maps->up_bias + slot * maps->outputs : NULL,
        maps->out + row * maps->out_stride, maps->out_stride, (int)maps->adds, 0
    };
    if (maps->down) {
        Product down = {
            up.x, up.x_stride, maps->down + slot * maps->inputs * maps->rank, maps->rank, maps->inputs,
            maps->down_bias ? maps->down_bias + slot * maps->rank : NULL, inner, maps->rank, 0, (int)maps->relu
        };
        AT(multiply)(down, count, maps->rank);
        up.x = inner;
        up.x_stride = maps->rank;
    }
    AT(multiply)(up, count, maps->outputs);
}

/* Pieces of runs, which are numbered through all runs. */
static void AT(map_pieces)(const void *given, int64_t next, int64_t end) {
    const Maps *maps = given;
    for (int64_t run = 0, before = 0, pieces; before < end; run++, before += pieces) {
        int64_t first = maps->starts[run], rows = maps->starts[run + 1] - first;
        pieces = pieces_of(maps, run);
        for (; next < before + pieces && next < end; next++) {
            int64_t row = (next - before) * rows / pieces;
            AT(map_rows)(maps, maps->slots[run], first + row, (next - before + 1) * rows / pieces - row);
        }
    }
}
#endif
