/* Products of rows with the weights of their slots, which are read where they lie. kernel.py calls it.
 *
 * The numbers of a row do not depend on its neighbours.
 */

#define VERSION 2 /* of these functions, as in kernel.py */
#include "../model/kernel.h"

/* As in kernel.py: the inner numbers of a run stay in the cache. */
#define MOST_RANK 256
#define MOST_ROWS 60 /* a multiple of the rows of a block */

/* Rows x `inputs` times `inputs` x two registers of outputs. `bias` may be NULL. `adds`: to what `out` holds. */
typedef struct {
    const float *x;
    int64_t x_stride;
    const float *weight;
    int64_t weight_stride, inputs;
    const float *bias;
    float *out;
    int64_t out_stride;
    int adds, relu;
} Product;

/* A block of ROWS rows, with REGISTERS registers of outputs. Inputs are added in their order. A NaN stays one. */
#define BLOCK(NAME, TARGET, VECTOR, WIDTH, LOAD, STORE, ZERO, ADD, MAX, FMA, SET1, ROWS, REGISTERS)                              \
    TARGET static void NAME(const Product *p) {                                                                              \
        VECTOR sum[ROWS][REGISTERS];                                                                                         \
        _Pragma("GCC unroll 16") for (int r = 0; r < ROWS; r++)                                                                \
            _Pragma("GCC unroll 2") for (int v = 0; v < REGISTERS; v++) {                                                      \
                sum[r][v] = p->adds ? LOAD(p->out + r * p->out_stride + v * WIDTH) : ZERO();                                   \
                if (p->bias) sum[r][v] = ADD(sum[r][v], LOAD(p->bias + v * WIDTH));                                            \
            }                                                                                                                  \
        const float *weight = p->weight, *x = p->x;                                                                            \
        for (int64_t i = 0; i < p->inputs; i++, weight += p->weight_stride, x++) {                                             \
            VECTOR w[REGISTERS];                                                                                               \
            _Pragma("GCC unroll 2") for (int v = 0; v < REGISTERS; v++) w[v] = LOAD(weight + v * WIDTH);                       \
            _Pragma("GCC unroll 16") for (int r = 0; r < ROWS; r++) {                                                          \
                VECTOR number = SET1(x[r * p->x_stride]);                                                                      \
                _Pragma("GCC unroll 2") for (int v = 0; v < REGISTERS; v++) sum[r][v] = FMA(number, w[v], sum[r][v]);          \
            }                                                                                                                  \
        }                                                                                                                      \
        _Pragma("GCC unroll 16") for (int r = 0; r < ROWS; r++)                                                                \
            _Pragma("GCC unroll 2") for (int v = 0; v < REGISTERS; v++)                                                        \
                STORE(p->out + r * p->out_stride + v * WIDTH, p->relu ? MAX(ZERO(), sum[r][v]) : sum[r][v]);                   \
    }

#define AVX2 __attribute__((target("avx2,fma")))
#define AVX512 __attribute__((target("avx512f")))
#define BLOCK2(ROWS, REGISTERS)                                                                                                \
    BLOCK(avx2_##ROWS##_##REGISTERS, AVX2, __m256, 8, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_setzero_ps, _mm256_add_ps,     \
          _mm256_max_ps, _mm256_fmadd_ps, _mm256_set1_ps, ROWS, REGISTERS)
#define BLOCK5(ROWS, REGISTERS)                                                                                                \
    BLOCK(avx512_##ROWS##_##REGISTERS, AVX512, __m512, 16, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_setzero_ps,               \
          _mm512_add_ps, _mm512_max_ps, _mm512_fmadd_ps, _mm512_set1_ps, ROWS, REGISTERS)
#define BOTH(BLOCK, ROWS) BLOCK(ROWS, 1) BLOCK(ROWS, 2)

BOTH(BLOCK2, 1) BOTH(BLOCK2, 2) BOTH(BLOCK2, 3) BOTH(BLOCK2, 4) BOTH(BLOCK2, 5) BOTH(BLOCK2, 6)
BOTH(BLOCK5, 1) BOTH(BLOCK5, 2) BOTH(BLOCK5, 3) BOTH(BLOCK5, 4) BOTH(BLOCK5, 5) BOTH(BLOCK5, 6)
BOTH(BLOCK5, 7) BOTH(BLOCK5, 8) BOTH(BLOCK5, 9) BOTH(BLOCK5, 10) BOTH(BLOCK5, 11) BOTH(BLOCK5, 12)

#define PAIR(SET, ROWS) {SET##_##ROWS##_1, SET##_##ROWS##_2}
typedef void Block(const Product *);
static Block *const BLOCKS2[][2] = {PAIR(avx2, 1), PAIR(avx2, 2), PAIR(avx2, 3), PAIR(avx2, 4), PAIR(avx2, 5), PAIR(avx2, 6)};
static Block *const BLOCKS5[][2] = {
    PAIR(avx512, 1), PAIR(avx512, 2), PAIR(avx512, 3), PAIR(avx512, 4),  PAIR(avx512, 5),  PAIR(avx512, 6),
    PAIR(avx512, 7), PAIR(avx512, 8), PAIR(avx512, 9), PAIR(avx512, 10), PAIR(avx512, 11), PAIR(avx512, 12)};

/* All rows and outputs of a product, block by block. */
static void multiply(Product p, int64_t rows, int64_t outputs, int64_t instructions) {
    Block *const(*blocks)[2] = instructions == 2 ? BLOCKS5 : BLOCKS2;
    int64_t most = instructions == 2 ? 12 : 6, width = instructions == 2 ? 16 : 8, count = (rows + most - 1) / most;
    for (int64_t output = 0, step; output < outputs; output += step) {
        step = outputs - output >= 2 * width ? 2 * width : width;
        Product part = p;
        part.weight += output;
        part.bias = p.bias ? p.bias + output : NULL;
        for (int64_t block = 0, first = 0; block < count; block++) {
            int64_t end = (block + 1) * rows / count, height = end - first;
            part.x = p.x + first * p.x_stride;
            part.out = p.out + output + first * p.out_stride;
            blocks[height - 1][step == 2 * width](&part);
            first = end;
        }
    }
}

/* The matrices of all slots, inputs x outputs, and their biases, which may be NULL. */
typedef struct {
    const float *down, *down_bias; /* NULL: there is only `up` */
    const float *up, *up_bias;
    int64_t inputs, rank, outputs; /* `up` has rank x outputs */
    int64_t relu, adds;            /* after `down`; whether the result is added to `out` */
} Maps;

/* Rows in runs of one slot each, which threads take piece by piece. */
typedef struct {
    const Maps *maps;
    const int64_t *starts, *slots; /* the first row of each run and the end of the last one; the slot of each */
    int64_t count;
    const float *x;
    int64_t x_stride;
    float *out;
    int64_t out_stride, instructions, next;
} Work;

static void map_piece(const Work *work, int64_t slot, int64_t row, int64_t count) {
    float inner[MOST_ROWS * MOST_RANK];
    const Maps *maps = work->maps;
    Product up = {
        work->x + row * work->x_stride, work->x_stride, maps->up + slot * maps->rank * maps->outputs, maps->outputs, maps->rank,
        maps->up_bias ? maps->up_bias + slot * maps->outputs : NULL,
        work->out + row * work->out_stride, work->out_stride, (int)maps->adds, 0
    };
    if (maps->down) {
        Product down = {
            up.x, up.x_stride, maps->down + slot * maps->inputs * maps->rank, maps->rank, maps->inputs,
            maps->down_bias ? maps->down_bias + slot * maps->rank : NULL, inner, maps->rank, 0, (int)maps->relu
        };
        multiply(down, count, maps->rank, work->instructions);
        up.x = inner;
        up.x_stride = maps->rank;
    }
    multiply(up, count, maps->outputs, work->instructions);
}

static int64_t pieces_of(const Work *work, int64_t run) {
    return (work->starts[run + 1] - work->starts[run] + MOST_ROWS - 1) / MOST_ROWS;
}

static void map_pieces(void *given) {
    Work *work = given;
    int64_t piece = 0, mine = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
    for (int64_t run = 0; run < work->count; run++) {
        int64_t first = work->starts[run], rows = work->starts[run + 1] - first, pieces = pieces_of(work, run);
        for (int64_t own = 0; own < pieces; own++, piece++) {
            if (piece != mine) continue;
            int64_t row = own * rows / pieces;
            map_piece(work, work->slots[run], first + row, (own + 1) * rows / pieces - row);
            mine = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
        }
    }
}

/* Writes into each row of `out`, or adds to it: up (f (down x + down_bias)) + up_bias, with the maps of the row's slot.
 *
 * A rank before `up` is at most MOST_RANK. Ranks after `down` and outputs are multiples of 16. `x` may be `out`.
 */
API void hplm_map(
    const Maps *maps, const int64_t *starts, const int64_t *slots, int64_t count, const float *x, int64_t x_stride, float *out,
    int64_t out_stride, int64_t instructions, Parallel *parallel, int64_t threads
) {
    Work work = {maps, starts, slots, count, x, x_stride, out, out_stride, instructions, 0};
    int64_t pieces = 0;
    for (int64_t run = 0; run < count && pieces < threads; run++) pieces += pieces_of(&work, run);
    if (pieces < threads) threads = pieces;
    if (parallel && threads > 1) parallel(map_pieces, &work, (unsigned)threads, 0);
    else map_pieces(&work);
}
