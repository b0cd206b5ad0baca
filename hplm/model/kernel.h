/* What compiled kernels share: the version of their functions, the processor's instructions, and threads. Include it behind
 * VERSION, which is that of the room's kernel.py.
 */

#include <cpuid.h>
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define API __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

API int64_t hplm_version(void) { return VERSION; }

/* Returns the best set of instructions: 0 none, 1 AVX2 with FMA and F16C, 2 AVX-512 with BW, DQ and VL. */
API int64_t hplm_instructions(void) {
    unsigned int a, b, c, d;
    __builtin_cpu_init();
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & (1u << 29))) return 0; /* F16C */
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") ? 2 : 1;
}

/* Calls a function in several threads: OpenMP's GOMP_parallel. NULL: there is one thread. */
typedef void Parallel(void (*)(void *), void *, unsigned, unsigned);

/* Threads take pieces of a task until all of its `count` items are computed. */
typedef struct {
    void (*compute)(const void *given, int64_t first, int64_t end);
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

static inline void compute_all(Task task, Parallel *parallel, int64_t threads) {
    if (parallel && threads > 1) parallel(compute_pieces, &task, (unsigned)threads, 0);
    else compute_pieces(&task);
}
