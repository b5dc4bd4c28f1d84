/* Attention of Lorsa heads: b sequences, g QK groups of width dh, `size` heads of value width 1 per group.

   attend_forward   z = softmax(scale q k^T) v with q, k rotated on the way in
   attend_backward  dq, dk, dv (and dsink) from dz, recomputing the weights. dz is given dense, or as K entries per
                    token (heads ascending), or as the sum of both. Rows of a group whose dz is all zero are skipped,
                    and in the others only the heads that are not zero are touched, unless most are

   A task is one sequence and group: its keys and values are packed once, queries go in blocks of ROWS, all products
   run through `tile`, and keys beyond the causal edge are not computed. A query sees keys [i - window + 1, i]. The
   sink is one more logit in the softmax's denominator. Each function returns 0, or 1 when memory ran out. */
#include "transpose.h"

enum { TILE = 6, ROWS = 48, AHEAD = 16 };

typedef struct {
    int64_t b, g, t, dh, size;
    int64_t window;     /* t when there is none */
    int64_t half;       /* rotated planes; 0 when there is no rotation */
    int64_t interleaved;
    int64_t q_b, q_g, q_t, k_b, k_g, k_t; /* strides in floats; v, z and the gradients are dense [b, t, n or g * dh] */
    float scale;
    int32_t threads;
    const float *q, *k, *v, *cos, *sin /* [t, half] */, *sink /* [g] or NULL */;
} Attention;

typedef struct {
    float *q, *k, *kt, *vt; /* q [ROWS, dh], scaled; k [t, dh]; kt [dh, t]; vt [size, t]; widths rounded up */
    float *v;               /* forward: [t, size] */
    float *p, *s;           /* weights and their gradients [ROWS, t] */
    float *dz, *dq, *dk, *dvt;
    float sunk[ROWS];       /* weight of the sink */
    int64_t dh, size, t;
} Scratch;

/* c[r][0:COLS] (+)= sum_l a[r * ar + l * al] * b[l * ldb + 0:COLS], for TILE rows r */
static inline __attribute__((always_inline)) void tile(int64_t n, const float *a, int64_t ar, int64_t al,
                                                       const float *b, int64_t ldb, float *c, int64_t ldc, int add) {
    vec acc[TILE][VECS];
#pragma GCC unroll 6
    for (int r = 0; r < TILE; r++)
#pragma GCC unroll 4
        for (int j = 0; j < VECS; j++) acc[r][j] = add ? load(c + r * ldc + j * W) : (vec){};
    for (int64_t l = 0; l < n; l++) {
        vec row[VECS];
#pragma GCC unroll 4
        for (int j = 0; j < VECS; j++) row[j] = load(b + l * ldb + j * W);
#pragma GCC unroll 6
        for (int r = 0; r < TILE; r++) {
            vec x = all(a[r * ar + l * al]);
#pragma GCC unroll 4
            for (int j = 0; j < VECS; j++) acc[r][j] += x * row[j];
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < TILE; r++)
#pragma GCC unroll 4
        for (int j = 0; j < VECS; j++) store(c + r * ldc + j * W, acc[r][j]);
}

/* Turn scores s[low..high] of one query into weights in place; the rest of s[from..to) becomes 0. Returns the weight
   that went to the sink. */
static float softmax(float *s, int64_t low, int64_t high, int64_t from, int64_t to, const float *sink) {
    for (int64_t j = from; j < low; j++) s[j] = -1e30f;
    for (int64_t j = high + 1; j < to; j++) s[j] = -1e30f;
    vec most = all(-1e30f);
    for (int64_t j = from; j < to; j += W) {
        vec x = load(s + j);
        most = pick(x > most, x, most);
    }
    float peak = sink ? *sink : most[0];
    for (int i = 0; i < W; i++) peak = most[i] > peak ? most[i] : peak;
    vec total = {};
    for (int64_t j = from; j < to; j += W) {
        vec x = exp_of(load(s + j) - peak);
        total += x;
        store(s + j, x);
    }
    float whole = sum(total);
    float sunk = sink ? exp_of(all(*sink - peak))[0] : 0;
    vec norm = all(1.0f / (whole + sunk));
    for (int64_t j = from; j < to; j += W) store(s + j, load(s + j) * norm);
    return sunk * norm[0];
}

/* One rotated, scaled row of dh floats */
static void rotate_in(const Attention *a, const float *restrict x, int64_t at, float scale, float *restrict out) {
    int64_t first = a->interleaved ? 2 : 1, second = a->interleaved ? 1 : a->half;
    const float *c = a->cos + at * a->half, *s = a->sin + at * a->half;
    for (int64_t i = 0; i < a->half; i++) {
        float x0 = x[i * first], x1 = x[i * first + second];
        out[i * first] = (x0 * c[i] - x1 * s[i]) * scale;
        out[i * first + second] = (x1 * c[i] + x0 * s[i]) * scale;
    }
    for (int64_t i = 2 * a->half; i < a->dh; i++) out[i] = x[i] * scale;
}

/* The transpose of `rotate_in`: from the gradient of the rotated row to that of the row */
static void rotate_out(const Attention *a, const float *restrict x, int64_t at, float scale, float *restrict out) {
    int64_t first = a->interleaved ? 2 : 1, second = a->interleaved ? 1 : a->half;
    const float *c = a->cos + at * a->half, *s = a->sin + at * a->half;
    for (int64_t i = 0; i < a->half; i++) {
        float x0 = x[i * first], x1 = x[i * first + second];
        out[i * first] = (x0 * c[i] + x1 * s[i]) * scale;
        out[i * first + second] = (x1 * c[i] - x0 * s[i]) * scale;
    }
    for (int64_t i = 2 * a->half; i < a->dh; i++) out[i] = x[i] * scale;
}

static int reserve(const Attention *a, Scratch *m, int backward) {
    m->dh = round_up(a->dh, COLS), m->size = round_up(a->size, COLS), m->t = round_up(a->t + TILE, COLS);
    int64_t tall = m->t, high = round_up(a->size, TILE); /* tiles of keys as rows may run over the end */
    *m = (Scratch){.q = floats(ROWS * m->dh), .k = floats(tall * m->dh), .kt = floats(m->dh * m->t),
                   .p = floats(ROWS * m->t), .dh = m->dh, .size = m->size, .t = m->t};
    int ok = m->q && m->k && m->kt && m->p;
    if (!backward) {
        m->v = floats(tall * m->size), m->dz = floats(ROWS * m->size);
        return ok && m->v && m->dz;
    }
    m->vt = floats(m->size * m->t), m->dvt = floats(high * m->t), m->s = floats(ROWS * m->t);
    m->dz = floats(ROWS * m->size + TILE), m->dq = floats(ROWS * m->dh), m->dk = floats(tall * m->dh);
    return ok && m->vt && m->dvt && m->s && m->dz && m->dq && m->dk;
}

static void release(Scratch *m) {
    free(m->q), free(m->k), free(m->kt), free(m->vt), free(m->v), free(m->p), free(m->s);
    free(m->dz), free(m->dq), free(m->dk), free(m->dvt);
}

static void pack_keys(const Attention *a, Scratch *m, int64_t b, int64_t g) {
    const float *k = a->k + b * a->k_b + g * a->k_g;
    for (int64_t j = 0; j < a->t; j++) {
        if (j + AHEAD < a->t) soon(k + (j + AHEAD) * a->k_t, a->dh);
        rotate_in(a, k + j * a->k_t, j, 1.0f, m->k + j * m->dh);
    }
    transpose(m->k, a->t, a->dh, m->dh, m->kt, m->t);
}

/* Weights of the n queries `rows` (ascending) into m->p; returns the first column computed, *to is one past the last */
static int64_t weigh(const Attention *a, Scratch *m, int64_t b, int64_t g, const int64_t *rows, int64_t n, int64_t *to) {
    const float *q = a->q + b * a->q_b + g * a->q_g;
    for (int64_t r = 0; r < n; r++) soon(q + rows[r] * a->q_t, a->dh);
    for (int64_t r = 0; r < n; r++) rotate_in(a, q + rows[r] * a->q_t, rows[r], a->scale, m->q + r * m->dh);
    int64_t low = rows[0] - a->window + 1;
    int64_t from = low > 0 ? low / COLS * COLS : 0;
    *to = round_up(rows[n - 1] + 1, COLS);
    for (int64_t j = from; j < *to; j += COLS)
        for (int64_t r = 0; r < n; r += TILE) {
            int64_t last = rows[r + TILE <= n ? r + TILE - 1 : n - 1];
            if (j <= last) tile(a->dh, m->q + r * m->dh, m->dh, 1, m->kt + j, m->t, m->p + r * m->t + j, m->t, 0);
        }
    for (int64_t r = 0; r < n; r++) {
        int64_t first = rows[r] - a->window + 1;
        m->sunk[r] = softmax(m->p + r * m->t, first > 0 ? first : 0, rows[r], from, *to, a->sink ? a->sink + g : NULL);
    }
    for (int64_t r = n; r < round_up(n, TILE); r++) memset(m->p + r * m->t + from, 0, (*to - from) * 4);
    return from;
}

/* out[r][0:width] = sum over keys j in [from, rows[r]] of x[r][j] y[j][0:width], for n queries */
static void gather(const float *x, int64_t ldx, const float *y, int64_t width, const int64_t *rows, int64_t n,
                   int64_t from, float *out) {
    for (int64_t j = from; j <= rows[n - 1]; j += COLS)
        for (int64_t r = 0; r < n; r += TILE) {
            int64_t last = rows[r + TILE <= n ? r + TILE - 1 : n - 1];
            int64_t keys = last + 1 - j < COLS ? last + 1 - j : COLS;
            if (keys <= 0) continue;
            for (int64_t c = 0; c < width; c += COLS)
                tile(keys, x + r * ldx + j, ldx, 1, y + j * width + c, width, out + r * width + c, width, j > from);
        }
}

int attend_forward(const Attention *a, float *z) {
    int failed = 0;
#pragma omp parallel reduction(| : failed) num_threads(a->threads)
    {
        Scratch m;
        failed = !reserve(a, &m, 0);
#pragma omp for schedule(static)
        for (int64_t task = 0; task < a->b * a->g; task++) {
            if (failed) continue;
            int64_t b = task / a->g, g = task % a->g, n = a->g * a->size;
            const float *v = a->v + b * a->t * n + g * a->size;
            float *out = z + b * a->t * n + g * a->size;
            pack_keys(a, &m, b, g);
            for (int64_t j = 0; j < a->t; j++) {
                if (j + AHEAD < a->t) soon(v + (j + AHEAD) * n, a->size);
                memcpy(m.v + j * m.size, v + j * n, a->size * 4);
            }
            for (int64_t i0 = 0; i0 < a->t; i0 += ROWS) {
                int64_t rows[ROWS], count = a->t - i0 < ROWS ? a->t - i0 : ROWS, to;
                for (int64_t r = 0; r < count; r++) rows[r] = i0 + r;
                int64_t from = weigh(a, &m, b, g, rows, count, &to);
                gather(m.p, m.t, m.v, m.size, rows, count, from, m.dz);
                for (int64_t r = 0; r < count; r++) memcpy(out + rows[r] * n, m.dz + r * m.size, a->size * 4);
            }
        }
        release(&m);
    }
    return failed;
}

/* The gradient of z: dense [b, t, n] or NULL, plus entries [b * t, k] (k = 0: none) */
typedef struct {
    const float *dense, *values;
    const int64_t *heads;
    int64_t k;
    const int32_t *starts; /* [b * t, g + 1]: where each group's entries begin */
} Gradient;

static int32_t *find_starts(const Attention *a, const Gradient *dz) {
    int32_t *starts = malloc(a->b * a->t * (a->g + 1) * sizeof *starts);
    if (!starts) return NULL;
#pragma omp parallel for schedule(static) num_threads(a->threads)
    for (int64_t r = 0; r < a->b * a->t; r++)
        for (int64_t g = 0, i = 0; g <= a->g; g++) {
            while (i < dz->k && dz->heads[r * dz->k + i] < g * a->size) i++;
            starts[r * (a->g + 1) + g] = (int32_t)i;
        }
    return starts;
}

/* Queries of one group with a gradient, up to ROWS of them from position *at on; their dz rows go to m->dz */
static int64_t next_rows(const Attention *a, Scratch *m, const Gradient *dz, int64_t b, int64_t g, int64_t *at,
                         int64_t *rows, int64_t *named) {
    int64_t found = 0;
    *named = 0;
    for (; *at < a->t && found < ROWS; ++*at) {
        int64_t r = b * a->t + *at, n = a->g * a->size, count = 0;
        int64_t first = dz->k ? dz->starts[r * (a->g + 1) + g] : 0, last = dz->k ? dz->starts[r * (a->g + 1) + g + 1] : 0;
        float *x = m->dz + found * m->size;
        if (!dz->dense && first == last) continue;
        if (dz->dense) {
            const float *row = dz->dense + r * n + g * a->size;
            if (*at + AHEAD < a->t) soon(row + AHEAD * n, a->size);
            memcpy(x, row, a->size * 4);
        } else memset(x, 0, a->size * 4);
        for (int64_t i = first; i < last; i++) x[dz->heads[r * dz->k + i] - g * a->size] += dz->values[r * dz->k + i];
        for (int64_t h = 0; h < a->size; h++) count += x[h] != 0;
        if (!count) continue;
        rows[found++] = *at;
        *named += count;
    }
    if (found) memset(m->dz + found * m->size, 0, (round_up(found, TILE) - found) * m->size * 4);
    return found;
}

/* s = dz v^T and dv^T += dz^T p, head by head where dz is sparse, by tiles where it is not */
static void spread_values(const Attention *a, Scratch *m, const int64_t *rows, int64_t n, int64_t named, int64_t from,
                          int64_t to) {
    if (named * 4 > n * a->size) {
        for (int64_t j = from; j < to; j += COLS) {
            for (int64_t r = 0; r < n; r += TILE)
                tile(a->size, m->dz + r * m->size, m->size, 1, m->vt + j, m->t, m->s + r * m->t + j, m->t, 0);
            for (int64_t h = 0; h < a->size; h += TILE)
                tile(n, m->dz + h, 1, m->size, m->p + j, m->t, m->dvt + h * m->t + j, m->t, 1);
        }
        return;
    }
    for (int64_t r = 0; r < n; r++) {
        float *s = m->s + r * m->t;
        const float *p = m->p + r * m->t, *dz = m->dz + r * m->size;
        int64_t end = round_up(rows[r] + 1, W);
        memset(s + from, 0, (to - from) * 4);
        for (int64_t h = 0; h < a->size; h++) {
            if (dz[h] == 0) continue;
            const float *v = m->vt + h * m->t;
            float *dv = m->dvt + h * m->t;
            for (int64_t j = from; j < end; j += W) {
                store(s + j, load(s + j) + dz[h] * load(v + j));
                store(dv + j, load(dv + j) + dz[h] * load(p + j));
            }
        }
    }
}

/* dq rows of the block and dk from the gradients of the weights in m->s, which become those of the scores */
static float spread_scores(Scratch *m, const int64_t *rows, int64_t n, int64_t from, int64_t to) {
    float sunk = 0;
    for (int64_t r = 0; r < n; r++) {
        float *s = m->s + r * m->t;
        const float *p = m->p + r * m->t;
        vec product = {};
        for (int64_t j = from; j < to; j += W) product += load(p + j) * load(s + j);
        float delta = sum(product);
        for (int64_t j = from; j < to; j += W) store(s + j, load(p + j) * (load(s + j) - delta));
        sunk -= m->sunk[r] * delta;
    }
    /* tiles run over the last query and the last key: what they meet there must be 0 */
    int64_t high = round_up(n, TILE), past = to + TILE < m->t ? to + TILE : m->t;
    for (int64_t r = 0; r < n; r++) memset(m->s + r * m->t + to, 0, (past - to) * 4);
    for (int64_t r = n; r < high; r++) memset(m->s + r * m->t + from, 0, (past - from) * 4);
    gather(m->s, m->t, m->k, m->dh, rows, n, from, m->dq);
    for (int64_t j = from; j <= rows[n - 1]; j += TILE) {
        int64_t r = 0; /* queries before this key do not see it */
        while (rows[r] < j) r++;
        for (int64_t c = 0; c < m->dh; c += COLS)
            tile(n - r, m->s + r * m->t + j, 1, m->t, m->q + r * m->dh + c, m->dh, m->dk + j * m->dh + c, m->dh, 1);
    }
    return sunk;
}

int attend_backward(const Attention *a, const float *dense, const float *values, const int64_t *heads, int64_t k,
                    float *dq, float *dk, float *dv, float *dsink) {
    Gradient dz = {.dense = dense, .values = values, .heads = heads, .k = k};
    int32_t *starts = k ? find_starts(a, &dz) : NULL;
    int failed = k && !starts;
    dz.starts = starts;
    if (failed) return 1;
#pragma omp parallel reduction(| : failed) num_threads(a->threads)
    {
        Scratch m;
        failed = !reserve(a, &m, 1);
#pragma omp for schedule(static)
        for (int64_t task = 0; task < a->b * a->g; task++) {
            if (failed) continue;
            int64_t b = task / a->g, g = task % a->g, n = a->g * a->size, wide = a->g * a->dh;
            int64_t here = b * a->t * n + g * a->size, widths = b * a->t * wide + g * a->dh;
            pack_keys(a, &m, b, g);
            transpose(a->v + here, a->t, a->size, n, m.vt, m.t);
            memset(m.dk, 0, m.t * m.dh * 4), memset(m.dvt, 0, round_up(a->size, TILE) * m.t * 4);
            float sunk = 0;
            int64_t rows[ROWS], named, to, at = 0, done = 0;
            while (done < a->t) {
                int64_t count = next_rows(a, &m, &dz, b, g, &at, rows, &named);
                if (count) {
                    int64_t from = weigh(a, &m, b, g, rows, count, &to);
                    spread_values(a, &m, rows, count, named, from, to);
                    sunk += spread_scores(&m, rows, count, from, to);
                }
                for (int64_t r = 0; done < at; done++)
                    if (r < count && rows[r] == done) rotate_out(a, m.dq + r++ * m.dh, done, a->scale, dq + widths + done * wide);
                    else memset(dq + widths + done * wide, 0, a->dh * 4);
            }
            for (int64_t j = 0; j < a->t; j++) rotate_out(a, m.dk + j * m.dh, j, 1.0f, dk + widths + j * wide);
            transpose(m.dvt, a->size, a->t, m.t, dv + here, n);
            if (dsink) dsink[task] = sunk;
        }
        release(&m);
    }
    free(starts);
    return failed;
}
