/* Exact top-K of each row, and decoding with the K rows of W_O that a row names.

   topk_rows      values and heads of the K largest of max(z, 0), or of |z| when `is_signed`; heads ascend, and among
                  equal values the lowest heads are kept. NaN ranks above infinity, as in torch.
   decode_rows    y[r] = sum_k values[r, k] W_O[heads[r, k]]
   decode_values  dvalues[r, k] = dy[r] . W_O[heads[r, k]]
   decode_weights dW_O[h] = sum over the (r, k) that name h of values[r, k] dy[r], every row written once

   Nothing depends on the number of threads. Each function returns 0, or 1 when memory ran out. */
#include "vector.h"

/* Order of floats as order of integers: 0 for what can never be active. */
static inline int32_t rank_of(int32_t bits, int is_signed) {
    int32_t size = bits & 0x7fffffff;
    return is_signed || size > 0x7f800000 ? size : (bits > 0 ? bits : 0);
}

static int32_t kth_largest(int32_t *x, int64_t n, int64_t k) {
    int64_t low = 0, high = n - 1;
    while (low < high) {
        int32_t pivot = x[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (x[i] > pivot) i++;
            while (x[j] < pivot) j--;
            if (i <= j) {
                int32_t swap = x[i];
                x[i++] = x[j];
                x[j--] = swap;
            }
        }
        if (k - 1 <= j) high = j;
        else if (k - 1 >= i) low = i;
        else break;
    }
    return x[k - 1];
}

/* Heads whose rank is at least `threshold` (which is above 0), ascending; their ranks go to `ranks`. */
static int64_t collect(const int32_t *z, int64_t n, int is_signed, int32_t threshold, int32_t *ranks, int32_t *heads) {
    int64_t found = 0, h = 0;
    for (; h + W <= n; h += W) {
        ivec bits = *(const ivec *)(z + h), size = bits & 0x7fffffff;
        ivec hit = is_signed ? size >= threshold : (bits >= threshold) | (size > 0x7f800000);
        int32_t any = 0;
        for (int i = 0; i < W; i++) any |= hit[i];
        if (!any) continue;
        for (int i = 0; i < W; i++) {
            ranks[found] = rank_of(z[h + i], is_signed);
            heads[found] = (int32_t)(h + i);
            found -= hit[i];
        }
    }
    for (; h < n; h++) {
        int32_t rank = rank_of(z[h], is_signed);
        ranks[found] = rank;
        heads[found] = (int32_t)h;
        found += rank >= threshold;
    }
    return found;
}

int topk_rows(const float *z, int64_t rows, int64_t n, int64_t k, int is_signed, float *values, int64_t *heads,
              int threads) {
    int failed = 0;
    (void)threads;
#pragma omp parallel reduction(| : failed) num_threads(threads)
    {
        int32_t *ranks = malloc((n + W) * 4), *order = malloc((n + W) * 4), *where = malloc((n + W) * 4);
        int32_t threshold = 1; /* a guess from the row before: it costs or saves time and never changes the result */
        if (!ranks || !order || !where) failed = 1;
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            if (failed) continue;
            const float *row = z + r * n;
            float *value = values + r * k;
            int64_t *head = heads + r * k;
            int64_t found = collect((const int32_t *)row, n, is_signed, threshold, ranks, where);
            if (found < k && threshold > 1) found = collect((const int32_t *)row, n, is_signed, 1, ranks, where);
            int64_t kept = 0;
            if (found > k) {
                memcpy(order, ranks, found * 4);
                int32_t last = kth_largest(order, found, k);
                int64_t ties = k;
                for (int64_t i = 0; i < found; i++) ties -= ranks[i] > last;
                for (int64_t i = 0; i < found && kept < k; i++) {
                    int tie = ranks[i] == last && ties > 0;
                    ties -= tie;
                    if (ranks[i] > last || tie) head[kept] = where[i], value[kept++] = row[where[i]];
                }
                float edge;
                memcpy(&edge, &last, 4);
                edge *= 0.85f;
                memcpy(&threshold, &edge, 4);
                if (!(edge > 0) || edge > 3e38f) threshold = 1;
            } else {
                threshold = 1;
                for (; kept < found; kept++) head[kept] = where[kept], value[kept] = row[where[kept]];
                /* too few are active: fill with value 0 at the lowest inactive heads */
                for (int64_t h = 0, next = 0; kept < k; h++) {
                    if (next < found && where[next] == h) next++;
                    else head[kept] = h, value[kept++] = 0;
                }
            }
        }
        free(ranks), free(order), free(where);
    }
    return failed;
}

int decode_rows(const float *w, const float *values, const int64_t *heads, int64_t rows, int64_t k, int64_t d,
                float *y, int threads) {
    enum { N = 16 };
    (void)threads;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < rows; r++) {
        const float *value = values + r * k;
        const int64_t *head = heads + r * k;
        int64_t c = 0;
        for (; c + N * W <= d; c += N * W) {
            vec acc[N] = {};
            for (int64_t i = 0; i < k; i++) {
                const float *p = w + head[i] * d + c;
                for (int j = 0; j < N; j++) acc[j] += value[i] * load(p + j * W);
            }
            for (int j = 0; j < N; j++) store(y + r * d + c + j * W, acc[j]);
        }
        for (; c + W <= d; c += W) {
            vec acc = {};
            for (int64_t i = 0; i < k; i++) acc += value[i] * load(w + head[i] * d + c);
            store(y + r * d + c, acc);
        }
        for (; c < d; c++) {
            float acc = 0;
            for (int64_t i = 0; i < k; i++) acc += value[i] * w[head[i] * d + c];
            y[r * d + c] = acc;
        }
    }
    return 0;
}

static float dot(const float *a, const float *b, int64_t d) {
    vec acc[4] = {};
    int64_t c = 0;
    for (; c + 4 * W <= d; c += 4 * W)
        for (int j = 0; j < 4; j++) acc[j] += load(a + c + j * W) * load(b + c + j * W);
    for (; c + W <= d; c += W) acc[0] += load(a + c) * load(b + c);
    float s = sum((acc[0] + acc[1]) + (acc[2] + acc[3]));
    for (; c < d; c++) s += a[c] * b[c];
    return s;
}

int decode_values(const float *w, const float *dy, const int64_t *heads, int64_t rows, int64_t k, int64_t d,
                  float *dvalues, int threads) {
    (void)threads;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < k; i++) dvalues[r * k + i] = dot(w + heads[r * k + i] * d, dy + r * d, d);
    return 0;
}

int decode_weights(const float *values, const int64_t *heads, const float *dy, int64_t rows, int64_t k, int64_t d,
                   int64_t n, float *dw, int threads) {
    enum { N = 8 };
    (void)threads;
    /* entries sorted by head, stable, so that each row of dW is one sum in registers */
    int64_t *start = calloc(n + 1, sizeof *start);
    int32_t *row = malloc((rows * k + 1) * sizeof *row);
    float *value = malloc((rows * k + 1) * sizeof *value);
    int failed = !start || !row || !value;
    if (!failed) {
        for (int64_t e = 0; e < rows * k; e++) start[heads[e] + 1]++;
        for (int64_t h = 0; h < n; h++) start[h + 1] += start[h];
        for (int64_t e = 0; e < rows * k; e++) {
            int64_t to = start[heads[e]]++;
            row[to] = (int32_t)(e / k);
            value[to] = values[e];
        }
        for (int64_t h = n; h > 0; h--) start[h] = start[h - 1];
        start[0] = 0;
        for (int64_t c0 = 0; c0 < d; c0 += N * W) {
            int64_t c1 = c0 + N * W < d ? c0 + N * W : d;
#pragma omp parallel for schedule(static) num_threads(threads)
            for (int64_t h = 0; h < n; h++) {
                float *out = dw + h * d;
                int64_t c = c0;
                if (c + N * W <= c1) {
                    vec acc[N] = {};
                    for (int64_t e = start[h]; e < start[h + 1]; e++) {
                        const float *p = dy + row[e] * d + c;
                        for (int j = 0; j < N; j++) acc[j] += value[e] * load(p + j * W);
                    }
                    for (int j = 0; j < N; j++) store(out + c + j * W, acc[j]);
                    c += N * W;
                }
                for (; c < c1; c++) {
                    float acc = 0;
                    for (int64_t e = start[h]; e < start[h + 1]; e++) acc += value[e] * dy[row[e] * d + c];
                    out[c] = acc;
                }
            }
        }
    }
    free(start), free(row), free(value);
    return failed;
}
