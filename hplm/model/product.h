/* Products for a set of instructions (kernel.h). Inputs are added in their order, so the numbers of a row do not depend on its
 * neighbours.
 */

/* Some rows and registers of outputs. A NaN stays one. */
TARGET INLINE void AT(block)(const Product p, const int rows, const int registers) {
    VECTOR sum[12][2];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < registers; v++) {
            sum[r][v] = p.adds ? OP(loadu)(p.out + r * p.out_stride + v * WIDTH) : OP(setzero)();
            if (p.bias) sum[r][v] = OP(add)(sum[r][v], OP(loadu)(p.bias + v * WIDTH));
        }
    const float *weight = p.weight, *x = p.x;
    for (int64_t i = 0; i < p.inputs; i++, weight += p.weight_stride, x++) {
        VECTOR w[2];
        UNROLL for (int v = 0; v < registers; v++) w[v] = OP(loadu)(weight + v * WIDTH);
        UNROLL for (int r = 0; r < rows; r++) {
            VECTOR number = OP(set1)(x[r * p.x_stride]);
            UNROLL for (int v = 0; v < registers; v++) sum[r][v] = OP(fmadd)(number, w[v], sum[r][v]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < registers; v++)
            OP(storeu)(p.out + r * p.out_stride + v * WIDTH, p.relu ? OP(max)(OP(setzero)(), sum[r][v]) : sum[r][v]);
}

#define BLOCK(ROWS)                                                                   \
    TARGET static void AT(block1_##ROWS)(const Product *p) { AT(block)(*p, ROWS, 1); } \
    TARGET static void AT(block2_##ROWS)(const Product *p) { AT(block)(*p, ROWS, 2); }
#define PAIR(ROWS) {AT(block1_##ROWS), AT(block2_##ROWS)},
#if WIDTH == 16 /* the rows that the registers have room for */
#define SIZES(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11) DO(12)
#else
#define SIZES(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6)
#endif
SIZES(BLOCK)
static void (*const AT(BLOCKS)[][2])(const Product *) = {SIZES(PAIR)};

/* All rows and outputs, which are a multiple of 16, block by block. */
static void AT(multiply)(Product p, int64_t rows, int64_t outputs) {
    const int64_t most = sizeof AT(BLOCKS) / sizeof *AT(BLOCKS), count = (rows + most - 1) / most;
    const float *x = p.x, *bias = p.bias;
    float *out = p.out;
    for (int64_t output = 0, step; output < outputs; output += step, p.weight += step) {
        step = outputs - output >= 2 * WIDTH ? 2 * WIDTH : WIDTH;
        p.bias = bias ? bias + output : NULL;
        for (int64_t block = 0, first = 0, end; block < count; block++, first = end) {
            end = count == 1 ? rows : (block + 1) * rows / count;
            p.x = x + first * p.x_stride;
            p.out = out + output + first * p.out_stride;
            AT(BLOCKS)[end - first - 1][step == 2 * WIDTH](&p);
        }
    }
}
#undef BLOCK
#undef PAIR
#undef SIZES
