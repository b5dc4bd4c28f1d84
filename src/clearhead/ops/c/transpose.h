/* Transposing a matrix of floats. */
#ifndef CLEARHEAD_TRANSPOSE_H
#define CLEARHEAD_TRANSPOSE_H

#include "vector.h"

#ifdef __clang__
#define MIX(x, y, a, b, c, d) __builtin_shufflevector(x, y, a, b, c, d)
#else
#define MIX(x, y, a, b, c, d) __builtin_shuffle(x, y, (ivec4){a, b, c, d})
#endif

static inline void transpose4(const float *x, int64_t ldx, float *out, int64_t ldo) {
    vec4 a = *(const vec4 *)x, b = *(const vec4 *)(x + ldx);
    vec4 c = *(const vec4 *)(x + 2 * ldx), d = *(const vec4 *)(x + 3 * ldx);
    vec4 ab = MIX(a, b, 0, 4, 1, 5), cd = MIX(c, d, 0, 4, 1, 5), AB = MIX(a, b, 2, 6, 3, 7), CD = MIX(c, d, 2, 6, 3, 7);
    *(vec4 *)out = MIX(ab, cd, 0, 1, 4, 5);
    *(vec4 *)(out + ldo) = MIX(ab, cd, 2, 3, 6, 7);
    *(vec4 *)(out + 2 * ldo) = MIX(AB, CD, 0, 1, 4, 5);
    *(vec4 *)(out + 3 * ldo) = MIX(AB, CD, 2, 3, 6, 7);
}

/* out[j][i] = x[i][j], in squares of one cache line: rows far apart share a few cache sets, so each line is read once */
static inline void transpose(const float *x, int64_t rows, int64_t cols, int64_t ldx, float *out, int64_t ldo) {
    enum { S = 16 };
    for (int64_t i0 = 0; i0 < rows; i0 += S) {
        for (int64_t i = i0 + S; i < i0 + 2 * S && i < rows; i++) soon(x + i * ldx, cols);
        for (int64_t j0 = 0; j0 < cols; j0 += S) {
            int64_t ni = rows - i0 < S ? rows - i0 : S, nj = cols - j0 < S ? cols - j0 : S;
            const float *from = x + i0 * ldx + j0;
            float *to = out + j0 * ldo + i0;
            if (ni == S && nj == S) {
                for (int64_t j = 0; j < S; j += 4)
                    for (int64_t i = 0; i < S; i += 4) transpose4(from + i * ldx + j, ldx, to + j * ldo + i, ldo);
            } else {
                for (int64_t j = 0; j < nj; j++)
                    for (int64_t i = 0; i < ni; i++) to[j * ldo + i] = from[i * ldx + j];
            }
        }
    }
}

#endif
