/* Rounds tokens to 8 bits, in one pass over each row. kernel.py calls it; eightbit.py says what it computes. */

#include <stdint.h>
#include <string.h>

#define API __attribute__((visibility("default")))
#define VERSION 1 /* of these functions, as in kernel.py */
/* As in eightbit.py: */
#define LEVELS 127
#define ROUNDING (1.5f * (1 << 23) + 128)
#define LEAST 1e-30f
#define PIECE 16 /* rows that a thread takes at once */

typedef struct {
    const float *x;
    int64_t rows, inputs, stride;
    uint8_t *numbers; /* rows x inputs */
    float *scales;    /* of each row */
    int64_t next;
} Work;

API int64_t hplm_version(void) { return VERSION; }

/* The largest number is found among the bits without the sign, where a NaN is larger than all numbers. */
#define ROUND(NAME, TARGET)                                                                   \
    TARGET static void NAME(const float *restrict x, int64_t inputs, uint8_t *restrict numbers, float *scale) { \
        int32_t most = 0;                                                                     \
        float largest;                                                                        \
        for (int64_t i = 0; i < inputs; i++) {                                                \
            int32_t bits;                                                                     \
            memcpy(&bits, x + i, 4);                                                          \
            bits &= 0x7FFFFFFF;                                                               \
            most = bits > most ? bits : most;                                                 \
        }                                                                                     \
        memcpy(&largest, &most, 4);                                                           \
        if (largest < LEAST) largest = LEAST;                                                 \
        float by = LEVELS / largest;                                                          \
        for (int64_t i = 0; i < inputs; i++) {                                                \
            float rounded = ROUNDING + x[i] * by;                                             \
            uint32_t bits;                                                                    \
            memcpy(&bits, &rounded, 4);                                                       \
            numbers[i] = (uint8_t)bits;                                                       \
        }                                                                                     \
        *scale = largest / LEVELS;                                                            \
    }

ROUND(round_row, )
#if defined(__x86_64__)
ROUND(round_row_avx2, __attribute__((target("avx2"))))
ROUND(round_row_avx512, __attribute__((target("avx512f,avx512bw,avx512vl,prefer-vector-width=512"))))
#endif

static void round_rows(void *given) {
    Work *work = given;
    void (*round)(const float *, int64_t, uint8_t *, float *) = round_row;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) round = round_row_avx2;
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) round = round_row_avx512;
#endif
    for (;;) {
        int64_t row = PIECE * __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED), end = row + PIECE;
        if (row >= work->rows) return;
        for (end = end < work->rows ? end : work->rows; row < end; row++)
            round(work->x + row * work->stride, work->inputs, work->numbers + row * work->inputs, work->scales + row);
    }
}

/* `parallel` calls a function in several threads (OpenMP's GOMP_parallel); NULL: there is one thread. */
API void hplm_round(
    const float *x, int64_t rows, int64_t inputs, int64_t stride, uint8_t *numbers, float *scales,
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned), int64_t threads
) {
    Work work = {x, rows, inputs, stride, numbers, scales, 0};
    if (parallel && threads > 1) parallel(round_rows, &work, (unsigned)threads, 0);
    else round_rows(&work);
}
