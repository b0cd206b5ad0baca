/* What the compiled kernels of all rooms share, which are one library (`hplm/compiled.py`): the processor's instructions, and
 * threads.
 *
 * WIDTH is how many numbers of 32 bits a register holds; 32 is for bf16. A file that computes with such registers includes
 * itself once for each WIDTH, and is then the code for that width alone.
 */

#ifndef KERNEL_H
#define KERNEL_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define API __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define AT(name) JOIN(name##_, WIDTH) /* a name for each set of instructions */
#define TARGET JOIN(TARGET_, WIDTH)
#define TARGET_8 __attribute__((target("avx2,fma,f16c")))
#define TARGET_16 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")))
#define TARGET_32 __attribute__((target("avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")))
#define VECTOR JOIN(VECTOR_, WIDTH)
#define VECTOR_8 __m256
#define VECTOR_16 __m512
#define VECTOR_32 __m512
#define OP(name) JOIN(OP_, WIDTH)(name)
#define OP_8(name) _mm256_##name##_ps
#define OP_16(name) _mm512_##name##_ps
#define OP_32 OP_16

#define FOLD(NAME, STEP)                                                                 \
    TARGET_8 INLINE float NAME##_8(__m256 x) {                                           \
        __m128 half = STEP##_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)); \
        half = STEP##_ps(half, _mm_movehl_ps(half, half));                               \
        return _mm_cvtss_f32(STEP##_ss(half, _mm_shuffle_ps(half, half, 1)));            \
    }
FOLD(highest, _mm_max) FOLD(total, _mm_add)
#define highest_16 _mm512_reduce_max_ps
#define total_16 _mm512_reduce_add_ps

#define LOG2_E 1.44269504f
#define LEAST_POWER -127.0f /* it gives 0 */

/* Returns 2 to the power of a number from LEAST_POWER to 0. A NaN stays one. */
INLINE float power_of_2(float x) {
    uint32_t bits;
    float shifted = x + 12582912.0f, rest = x - (shifted - 12582912.0f), power; /* the whole part is in the last bits */
    float sum = 1.3264713e-3f;
    sum = __builtin_fmaf(sum, rest, 9.671523e-3f);
    sum = __builtin_fmaf(sum, rest, 5.550734e-2f);
    sum = __builtin_fmaf(sum, rest, 2.4022242e-1f);
    sum = __builtin_fmaf(sum, rest, 6.93147e-1f);
    sum = __builtin_fmaf(sum, rest, 1.0f);
    memcpy(&bits, &shifted, 4);
    bits = (bits - 0x4B400000 + 127) << 23;
    memcpy(&power, &bits, 4);
    return sum * power;
}

/* How a call computes. `parallel` calls a function in several threads: OpenMP's GOMP_parallel. NULL: there is one thread. */
typedef struct {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
    int64_t threads, instructions; /* 0: none of the sets, 1: AVX2, 2: AVX-512 */
} How;

/* Computes items of what was given, from `first` to before `end`. */
typedef void Compute(const void *given, int64_t first, int64_t end);

/* Threads take pieces of a task until all of its `count` items are computed. */
typedef struct {
    Compute *compute;
    const void *given;
    int64_t count, piece, next;
} Task;

static inline void compute_pieces(void *given) {
    Task *task = given;
    for (;;) {
        int64_t first = task->piece * __atomic_fetch_add(&task->next, 1, __ATOMIC_RELAXED), end = first + task->piece;
        if (first >= task->count) return;
        task->compute(task->given, first, end < task->count ? end : task->count);
    }
}

static inline void compute_all(const How *how, Compute *compute, const void *given, int64_t count, int64_t piece) {
    Task task = {compute, given, count, piece, 0};
    if (how->parallel && how->threads > 1) how->parallel(compute_pieces, &task, (unsigned)how->threads, 0);
    else compute_pieces(&task);
}

#endif
