"""Gated attention on the GPU: three Triton kernels, without atomics, in O(positions) memory.

    forward         one program per (batch, head, tile of rows), over the tiles of keys that its rows see
    query_gradient  the same order; writes dq, the row's share of the bias gradient, and terms for key_gradient
    key_gradient    one program per (batch, kv head, tile of keys), over the heads of the group and their tiles of rows

Logits are in units of log 2 from the start, y = x / ln 2 = q·k · scale/ln 2 + bias/ln 2, and the softmax runs over y:
the bias shifts every score of a row alike, so it leaves the softmax as it is. Every kernel decides a gate by the same
expression of (y, u) alone, with neither logarithm nor division:

    sampled  u (1 + r) < 1,  r = 2^−y               the same as u < σ(x)
    hard     y > 0

and takes q·k in the same order of factors, in tiles that the tensor cores multiply by the same instruction.

Each pair costs two exponentials. One would do where the softmax weight is made from r and a factor of its row, but then
|x| above 88 leaves the range of float32; or where r is made from the weight, but then the gate would depend on the
row's running maximum, which no two kernels share. σ = 1/(1 + r) is the square of a reciprocal root: one instruction,
and exactly 0 for the masked pairs, whose r is infinite.

Products of float32 are three products in tf32 each, which keeps about 21 of the 24 bits. The formulas are those of
gated.py; nothing here knows of autograd, shapes or tile sizes: see gated_triton.py.
"""

import triton
import triton.language as tl

OPEN = tl.constexpr(0)
HARD = tl.constexpr(1)
SAMPLED = tl.constexpr(2)
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)
"""Start of a running maximum: finite, so that a row which has seen nothing yet does not give ∞ − ∞."""
NEVER = tl.constexpr(-25.1)
"""Below this y a gate cannot open, whatever its noise: the smallest u is 2⁻²⁴."""


@triton.jit
def forward(
    Q, K, V, Bias, Sink, First, Keys, Out, Lse, Expected, Opened, Leak, Checksum, T, H, GROUP, scale, slope,
    D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, MODE: tl.constexpr,
    SINK: tl.constexpr, FIRST: tl.constexpr, SLOPED: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """One tile of rows: output, log of the denominator, expected and open edges, mass on closed edges."""
    tiles = tl.cdiv(T, ROWS)
    tile = tiles - 1 - tl.program_id(0) % tiles  # rows with the most keys first
    bh = tl.program_id(0) // tiles
    row = tile * ROWS + tl.arange(0, ROWS)
    inside = row < T
    visible, lowest = seen_by(First, row, T, bh // H, FIRST)
    bias = tl.load(Bias + bh % H) * LOG2E
    noise, second = row_noise(Keys, row, bh)
    q = load_rows(Q, row, T, bh, D)

    top = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if SINK:
        top = tl.zeros((ROWS,), tl.float32) + (tl.load(Sink + bh % H) * LOG2E + bias)
        total += 1.0
    mass = tl.zeros((ROWS,), tl.float32)
    expected = tl.zeros((ROWS,), tl.float32)
    opened = tl.zeros((ROWS,), tl.int32)
    sums = tl.zeros((ROWS,), tl.int32)
    acc = tl.zeros((ROWS, DV), tl.float32)
    for start in range(lowest // COLUMNS * COLUMNS, tl.minimum((tile + 1) * ROWS, T), COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        k = load_rows(K, column, T, bh // GROUP, D)
        far = row[:, None] - column[None, :]
        seen = far.to(tl.uint32, bitcast=True) < visible[:, None]
        y = logits(tl.dot(q, tl.trans(k), input_precision="tf32x3"), seen, scale, bias)
        r = tl.exp2(-y)
        probability = inverse(1.0 + r)
        if SLOPED:
            expected += tl.sum(probability * lengths(row[:, None], column[None, :], slope), 1)
        else:
            expected += tl.sum(probability, 1)
        highest = tl.max(y, 1)
        weight = y
        if not SINK:
            new = tl.maximum(top, highest)
            shrink = tl.exp2(top - new)
            weight = tl.exp2(y - new[:, None])
            total = total * shrink + tl.sum(weight, 1)
            mass *= shrink
            acc *= shrink[:, None]
            top = new
        # two questions to a whole tile: can a gate open (else no noise is made), and did one (else V is not read)
        if can_open(highest, MODE):
            gate, words = gates(y, r, seen, noise[:, None], second[:, None], column[None, :], MODE)
            count = tl.sum(gate.to(tl.int32), 1)
            if tl.max(count, 0) > 0:
                opened += count
                if CHECK:
                    sums += tl.sum(tl.where(gate, words, 0), 1)
                if SINK:
                    shown = tl.where(gate, y, float("-inf"))
                    new = tl.maximum(top, tl.max(shown, 1))
                    shrink = tl.exp2(top - new)
                    weight = tl.exp2(shown - new[:, None])
                    total = total * shrink + tl.sum(weight, 1)
                    acc *= shrink[:, None]
                    top = new
                else:
                    weight = tl.where(gate, weight, 0.0)
                    mass += tl.sum(weight, 1)
                v = load_rows(V, column, T, bh // GROUP, DV)
                acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="tf32x3")

    divisor = tl.where(total > 0.0, total, 1.0)
    store_rows(Out, acc / divisor[:, None], row, T, bh, DV)
    at = bh.to(tl.int64) * T + row
    lse = tl.where(total > 0.0, (top + tl.log2(divisor) - bias) / LOG2E, float("-inf"))
    tl.store(Lse + at, lse, mask=inside)
    tl.store(Expected + at, expected, mask=inside)
    tl.store(Opened + at, opened, mask=inside)
    if SINK or MODE == OPEN:
        tl.store(Leak + at, tl.zeros((ROWS,), tl.float32), mask=inside)
    else:
        tl.store(Leak + at, tl.where(total > 0.0, tl.maximum(1.0 - mass / divisor, 0.0), 0.0), mask=inside)
    if CHECK:
        tl.store(Checksum + at, sums, mask=inside)


@triton.jit
def query_gradient(
    Q, K, V, Bias, First, Keys, Out, Lse, dOut, dExpected, dQ, dBias, Terms, Checksum, T, H, GROUP, scale, slope,
    D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, MODE: tl.constexpr,
    EXACT: tl.constexpr, SINK: tl.constexpr, FIRST: tl.constexpr, SLOPED: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """One tile of rows: the gradient of its queries, and of the bias as far as these rows go."""
    tiles = tl.cdiv(T, ROWS)
    tile = tiles - 1 - tl.program_id(0) % tiles
    bh = tl.program_id(0) // tiles
    row = tile * ROWS + tl.arange(0, ROWS)
    inside = row < T
    visible, lowest = seen_by(First, row, T, bh // H, FIRST)
    bias = tl.load(Bias + bh % H) * LOG2E
    noise, second = row_noise(Keys, row, bh)
    q = load_rows(Q, row, T, bh, D)
    dout = load_rows(dOut, row, T, bh, DV)
    at = bh.to(tl.int64) * T + row
    lse = tl.load(Lse + at, mask=inside, other=0.0)
    lse = tl.where(lse == float("-inf"), 0.0, lse * LOG2E + bias)  # a row that sees nothing: any finite number will do
    price = tl.load(dExpected + at, mask=inside, other=0.0)
    delta = tl.sum(dout.to(tl.float32) * load_rows(Out, row, T, bh, DV).to(tl.float32), 1)
    store_terms(Terms, visible, lse, delta, price, row, T, bh)

    dq = tl.zeros((ROWS, D), tl.float32)
    dbias = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS,), tl.int32)
    for start in range(lowest // COLUMNS * COLUMNS, tl.minimum((tile + 1) * ROWS, T), COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        k = load_rows(K, column, T, bh // GROUP, D)
        v = load_rows(V, column, T, bh // GROUP, DV)
        far = row[:, None] - column[None, :]
        seen = far.to(tl.uint32, bitcast=True) < visible[:, None]
        y = logits(tl.dot(q, tl.trans(k), input_precision="tf32x3"), seen, scale, bias)
        dmix = tl.dot(dout, tl.trans(v), input_precision="tf32x3")
        _, dlogit, dgate, checked = slopes(
            y, dmix, seen, row[:, None], lse[:, None], delta[:, None], price[:, None], noise[:, None],
            second[:, None], column[None, :], slope, MODE, EXACT, SINK, SLOPED, CHECK,
        )  # fmt: skip
        dbias += tl.sum(dgate, 1)
        dq = tl.dot(dlogit.to(k.dtype), k, dq, input_precision="tf32x3")
        if CHECK:
            sums += tl.sum(checked, 1)
    store_rows(dQ, dq * scale, row, T, bh, D)
    tl.store(dBias + at, dbias, mask=inside)
    if CHECK:
        tl.store(Checksum + at, sums, mask=inside)


@triton.jit
def key_gradient(
    Q, K, V, Bias, Keys, dOut, Terms, End, dK, dV, Checksum, T, H, GROUP, scale, slope,
    D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, MODE: tl.constexpr,
    EXACT: tl.constexpr, SINK: tl.constexpr, FIRST: tl.constexpr, SLOPED: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """One tile of keys: the gradients of its keys and values, summed over all heads that read them."""
    tiles = tl.cdiv(T, COLUMNS)
    tile = tl.program_id(0) % tiles  # keys with the most rows first
    kv = tl.program_id(0) // tiles
    batch = kv * GROUP // H
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    k = load_rows(K, column, T, kv, D)
    v = load_rows(V, column, T, kv, DV)
    end = T
    if FIRST:
        end = tl.load(End + batch * tiles + tile)

    dk = tl.zeros((COLUMNS, D), tl.float32)
    dv = tl.zeros((COLUMNS, DV), tl.float32)
    for member in range(GROUP):
        bh = kv * GROUP + member
        bias = tl.load(Bias + kv * GROUP % H + member) * LOG2E
        sums = tl.zeros((COLUMNS,), tl.int32)
        for start in range(tile * COLUMNS // ROWS * ROWS, end, ROWS):
            row = start + tl.arange(0, ROWS)
            noise, second = row_noise(Keys, row, bh)  # pyright: ignore[reportGeneralTypeIssues]
            visible, lse, delta, price = load_terms(Terms, row, T, bh)
            q = load_rows(Q, row, T, bh, D)
            dout = load_rows(dOut, row, T, bh, DV)
            far = row[:, None] - column[None, :]
            seen = far.to(tl.uint32, bitcast=True) < visible[:, None]
            y = logits(tl.dot(q, tl.trans(k), input_precision="tf32x3"), seen, scale, bias)
            dmix = tl.dot(dout, tl.trans(v), input_precision="tf32x3")
            mixed, dlogit, _, checked = slopes(
                y, dmix, seen, row[:, None], lse[:, None], delta[:, None], price[:, None], noise[:, None],
                second[:, None], column[None, :], slope, MODE, EXACT, SINK, SLOPED, CHECK,
            )  # fmt: skip
            dv = tl.dot(tl.trans(mixed.to(dout.dtype)), dout, dv, input_precision="tf32x3")
            dk = tl.dot(tl.trans(dlogit.to(q.dtype)), q, dk, input_precision="tf32x3")
            if CHECK:
                sums += tl.sum(checked, 0)
        if CHECK:
            tl.store(Checksum + bh.to(tl.int64) * T + column, sums, mask=column < T)
    store_rows(dK, dk * scale, column, T, kv, D)
    store_rows(dV, dv, column, T, kv, DV)


@triton.jit
def logits(products, seen, scale, bias):
    """The y of every pair, −∞ where it is not seen. An explicit fused multiply-add: every kernel rounds alike."""
    return tl.where(seen, tl.fma(products, scale * LOG2E, bias), float("-inf"))


@triton.jit
def can_open(highest, MODE: tl.constexpr):
    """Whether a tile with these largest y of each row can have an open edge at all."""
    if MODE == SAMPLED:
        floor = NEVER
    elif MODE == HARD:
        floor = 0.0
    else:
        floor = float("-inf")
    return tl.max(highest, 0) > floor


@triton.jit
def gates(y, r, seen, noise, second, column, MODE: tl.constexpr):
    """Which edges are open, and the random words that the checksum of their gates adds up."""
    words = noise_words(noise, second, column)
    if MODE == SAMPLED:
        gate = uniforms(words) * (1.0 + r) < 1.0
    elif MODE == HARD:
        gate = y > 0.0
    else:
        gate = seen
    return gate, words.to(tl.int32, bitcast=True)


@triton.jit
def slopes(
    y, dmix, seen, row, lse, delta, price, noise, second, column, slope,
    MODE: tl.constexpr, EXACT: tl.constexpr, SINK: tl.constexpr, SLOPED: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """M P, dL/dS, its part through gate and penalty (which is also dL/dbias), and the words of the open edges."""
    r = tl.exp2(-y)
    weight = tl.exp2(y - lse)
    gate, words = gates(y, r, seen, noise, second, column, MODE)  # pyright: ignore[reportGeneralTypeIssues]
    probability = inverse(1.0 + r)
    steep = probability - probability * probability
    dgate = price * steep
    if SLOPED:
        dgate *= lengths(row, column, slope)
    if MODE == SAMPLED and not EXACT:
        u = uniforms(words)
        soft = (1.0 - u) * inverse((1.0 - u) + r * u)
        steep = soft - soft * soft
    mixed = tl.where(gate, weight, 0.0)
    if SINK:
        change = dmix - delta
        dlogit = mixed * change
        if MODE != OPEN:
            dgate += tl.minimum(weight, 1.0) * change * steep  # of a closed edge exp(S)/Z has no bound
    else:
        dlogit = mixed * dmix - weight * delta
        if MODE != OPEN:
            dgate += weight * dmix * steep
    if CHECK:
        words = tl.where(gate, words, 0)
    return mixed, dlogit + dgate, dgate, words


@triton.jit
def lengths(row, column, slope):
    """1 + slope (i − j), in two parts so that a pair costs a subtraction."""
    return (1.0 + slope * row.to(tl.float32)) - slope * column.to(tl.float32)


@triton.jit
def inverse(x):
    """1 / x of positive x, 0 of infinity."""
    root = tl.rsqrt(x)
    return root * root


@triton.jit
def row_noise(Keys, row, bh):
    """The two words of each row that its noise starts from; the second is multiplied in advance (see noise_words)."""
    noise = mixed_word(row.to(tl.uint32) * 0x9E3779B1 + tl.load(Keys + 2 * bh).to(tl.uint32, bitcast=True))
    second = mixed_word(noise ^ tl.load(Keys + 2 * bh + 1).to(tl.uint32, bitcast=True))
    return noise, second * 0x735A2D97


@triton.jit
def mixed_word(x):
    """The mixing of gated.py without a second word."""
    x ^= x >> 16
    x *= 0x21F0AAAD
    x ^= x >> 15
    x *= 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def noise_words(noise, second, column):
    """32 random bits of each pair, those of gated.noise_words; (x + second) · c is taken as x · c + second · c."""
    x = noise ^ (column.to(tl.uint32) * 0xC2B2AE3D)
    x ^= x >> 16
    x *= 0x21F0AAAD
    x ^= x >> 15
    x = x * 0x735A2D97 + second
    return x ^ (x >> 15)


@triton.jit
def uniforms(words):
    """Numbers between 0 and 1, those of gated.uniforms: 23 bits as the fraction of a float in [1, 2), less 1 − 2⁻²⁴."""
    fraction = (words.to(tl.uint32, bitcast=True) >> 9) | 0x3F800000
    return fraction.to(tl.float32, bitcast=True) - 0.99999994039535522


@triton.jit
def seen_by(First, row, T, batch, FIRST: tl.constexpr):
    """How many keys each row sees, its own and those before it (0 beyond the end), and the first key of any row."""
    first = tl.zeros_like(row)
    if FIRST:
        first = tl.maximum(tl.load(First + batch * T + row, mask=row < T, other=0), 0)
    visible = tl.where(row < T, tl.maximum(row - first + 1, 0), 0)
    return visible.to(tl.uint32), tl.min(tl.where(visible > 0, first, T), 0)


@triton.jit
def store_terms(Terms, visible, lse, delta, price, row, T, bh):
    """What the backward pass needs of each row: log of its denominator, against y; ∂L/∂out · out; ∂L/∂expected."""
    at = Terms + bh.to(tl.int64) * 4 * T + row
    tl.store(at, lse, mask=row < T)
    tl.store(at + T, delta, mask=row < T)
    tl.store(at + 2 * T, price, mask=row < T)
    tl.store(at + 3 * T, visible.to(tl.float32, bitcast=True), mask=row < T)


@triton.jit
def load_terms(Terms, row, T, bh):
    """The same, 0 beyond the end."""
    at = Terms + bh.to(tl.int64) * 4 * T + row
    lse = tl.load(at, mask=row < T, other=0.0)
    delta = tl.load(at + T, mask=row < T, other=0.0)
    price = tl.load(at + 2 * T, mask=row < T, other=0.0)
    visible = tl.load(at + 3 * T, mask=row < T, other=0.0).to(tl.uint32, bitcast=True)
    return visible, lse, delta, price


@triton.jit
def load_rows(X, row, T, at, WIDTH: tl.constexpr):
    """Rows of the matrix `at` of X [·, T, WIDTH]; 0 beyond its end."""
    offset = at.to(tl.int64) * T * WIDTH + row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return tl.load(X + offset, mask=row[:, None] < T, other=0.0)


@triton.jit
def store_rows(X, values, row, T, at, WIDTH: tl.constexpr):
    """Writes rows of the matrix `at` of X [·, T, WIDTH], in its precision."""
    offset = at.to(tl.int64) * T * WIDTH + row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(X + offset, values.to(X.dtype.element_ty), mask=row[:, None] < T)
