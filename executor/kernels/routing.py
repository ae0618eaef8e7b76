"""Choice of a token's experts, in Triton: the router's scores, the experts and their weights, and pairs by expert.

A pair is a token and one of its experts; pair `row * NUM_CHOSEN + k` is the k-th expert of a row. Pairs come in tiles
of `TILE_ROWS`, each of pairs of one expert: lane `l` of tile `t` is pair `pairs[t * TILE_ROWS + l]`, or none where that
is -1, and `tile_experts[t]` is the tile's expert, or -1 for a tile without pairs.

All of it is in float32. The sizes of tiles depend on the model alone, so the experts of a row and their weights do not
depend on the other rows.
"""

import triton
import triton.language as tl


# Numbers that differ from step to step are not specialised, because each kind would be compiled at its first use.
@triton.jit(do_not_specialize=["num_rows"])
def score_experts_kernel(
    hidden,  # [rows, size]
    router,  # [num_scores, size]
    biases,  # [num_scores]; unused without HAS_BIAS
    scores,  # [rows, num_scores] float32
    num_rows, hidden_stride, size, num_scores,
    HAS_BIAS: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_SCORES: tl.constexpr, TILE_SIZE: tl.constexpr,
):  # fmt: skip
    """Computes the scores of experts. Grid: tiles of rows, tiles of scores."""
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    columns = tl.program_id(1) * TILE_SCORES + tl.arange(0, TILE_SCORES)
    is_row, is_column = rows < num_rows, columns < num_scores
    source = hidden + rows[:, None].to(tl.int64) * hidden_stride
    matrix = router + columns[None, :] * size
    sums = tl.zeros([TILE_ROWS, TILE_SCORES], tl.float32)
    for start in range(0, size, TILE_SIZE):
        depth = start + tl.arange(0, TILE_SIZE)
        is_depth = depth < size
        values = tl.load(source + depth[None, :], mask=is_row[:, None] & is_depth[None, :], other=0.0)
        weights = tl.load(matrix + depth[:, None], mask=is_depth[:, None] & is_column[None, :], other=0.0)
        sums = tl.dot(values.to(weights.dtype), weights, sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(biases + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    target = scores + rows[:, None].to(tl.int64) * num_scores + columns[None, :]
    tl.store(target, sums, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def choose_experts_kernel(
    scores,  # as in `score_experts_kernel`, those of the experts first
    correction,  # [NUM_EXPERTS] float32, added for the choice alone; unused without HAS_CORRECTION
    experts,  # [rows, NUM_CHOSEN] int32, the largest weight first
    weights,  # the same float32
    num_scores, scale,
    NUM_EXPERTS: tl.constexpr, NUM_CHOSEN: tl.constexpr, PADDED_CHOSEN: tl.constexpr,
    NUM_GROUPS: tl.constexpr, NUM_CHOSEN_GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr, PADDED_MEMBERS: tl.constexpr,
    HAS_SIGMOID: tl.constexpr, HAS_CORRECTION: tl.constexpr, NORMALIZES: tl.constexpr,
):  # fmt: skip
    """Chooses the experts of each row; of equal ones the first. Grid: rows.

    A row with scores that are not numbers has some experts, and weights that are not numbers.
    """
    row = tl.program_id(0).to(tl.int64)
    NUM_MEMBERS: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    groups, members = tl.arange(0, PADDED_GROUPS), tl.arange(0, PADDED_MEMBERS)
    ids = groups[:, None] * NUM_MEMBERS + members[None, :]
    is_expert = (groups < NUM_GROUPS)[:, None] & (members < NUM_MEMBERS)[None, :]
    score = tl.load(scores + row * num_scores + ids, mask=is_expert, other=float("-inf"))
    if HAS_SIGMOID:
        weight = 1.0 / (1.0 + tl.exp(-score))
    else:
        exponential = tl.exp(score - tl.max(tl.max(score, 1), 0))
        weight = exponential / tl.sum(tl.sum(exponential, 1), 0)
    rank = weight
    if HAS_CORRECTION:
        rank += tl.load(correction + ids, mask=is_expert, other=0.0)
    rank = tl.where(is_expert & (rank == rank), rank, float("-inf"))
    is_open = is_expert
    if NUM_CHOSEN_GROUPS < NUM_GROUPS:
        best = tl.max(rank, 1)
        first = tl.min(tl.where(rank == best[:, None], members[None, :], PADDED_MEMBERS), 1)
        total = best + tl.max(tl.where(members[None, :] == first[:, None], float("-inf"), rank), 1)
        is_open_group = groups < 0
        for _ in range(NUM_CHOSEN_GROUPS):
            group = first_of_largest(total, (groups < NUM_GROUPS) & ~is_open_group, groups, NUM_GROUPS)
            is_open_group |= groups == group
        is_open &= is_open_group[:, None]
    rank, weight = tl.ravel(rank), tl.ravel(weight)
    is_open, ids = tl.ravel(is_open), tl.ravel(ids)
    lanes = tl.arange(0, PADDED_CHOSEN)
    chosen, weight_of = tl.zeros([PADDED_CHOSEN], tl.int32), tl.zeros([PADDED_CHOSEN], tl.float32)
    for k in range(NUM_CHOSEN):
        expert = first_of_largest(rank, is_open, ids, NUM_EXPERTS)
        is_open &= ids != expert
        chosen = tl.where(lanes == k, expert, chosen)
        weight_of = tl.where(lanes == k, tl.sum(tl.where(ids == expert, weight, 0.0), 0), weight_of)
    if NORMALIZES:
        # Sigmoids may all be 0. The sum changes only then.
        weight_of = weight_of / (tl.sum(weight_of, 0) + 1e-20)
    tl.store(experts + row * NUM_CHOSEN + lanes, chosen, mask=lanes < NUM_CHOSEN)
    tl.store(weights + row * NUM_CHOSEN + lanes, weight_of * scale, mask=lanes < NUM_CHOSEN)


@triton.jit
def first_of_largest(ranks, is_open, ids, COUNT: tl.constexpr):
    """Returns the least id of the largest rank among the open ones, below COUNT whatever the ranks are."""
    largest = tl.max(tl.where(is_open, ranks, float("-inf")), 0)
    return tl.minimum(tl.min(tl.where(is_open & (ranks == largest), ids, COUNT), 0), COUNT - 1)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def order_pairs_kernel(
    experts,  # [num_pairs] int32
    pairs, tile_experts,  # int32, see above
    num_pairs, num_tiles,
    NUM_EXPERTS: tl.constexpr, PADDED_EXPERTS: tl.constexpr, TILE_ROWS: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Puts pairs into tiles, experts and pairs in ascending order. Grid: experts. PADDED_EXPERTS is above NUM_EXPERTS,
    and TILE_ROWS at most SCAN.

    Each program counts the pairs of all experts, so that it knows where its own begin.
    """
    expert = tl.program_id(0)
    lanes, ids = tl.arange(0, SCAN), tl.arange(0, PADDED_EXPERTS)
    counts = tl.zeros([PADDED_EXPERTS], tl.int32)
    for start in range(0, num_pairs, SCAN):
        found = tl.load(experts + start + lanes, mask=start + lanes < num_pairs, other=NUM_EXPERTS)
        counts += tl.histogram(found, PADDED_EXPERTS)
    tiles = tl.where(ids < NUM_EXPERTS, (counts + TILE_ROWS - 1) // TILE_ROWS, 0)
    first = tl.sum(tl.where(ids < expert, tiles, 0), 0)
    end = first + tl.sum(tl.where(ids == expert, tiles, 0), 0)
    for start in range(first, end, SCAN):
        tl.store(tile_experts + start + lanes, expert, mask=start + lanes < end)
    # The last expert's program marks the tiles behind all others.
    for start in range(tl.where(expert == NUM_EXPERTS - 1, end, num_tiles), num_tiles, SCAN):
        tl.store(tile_experts + start + lanes, -1, mask=start + lanes < num_tiles)
    place = first * TILE_ROWS
    for start in range(0, num_pairs, SCAN):
        found = tl.load(experts + start + lanes, mask=start + lanes < num_pairs, other=NUM_EXPERTS)
        is_own = (found == expert).to(tl.int32)
        tl.store(pairs + place + tl.cumsum(is_own, 0) - 1, start + lanes, mask=is_own > 0)
        place += tl.sum(is_own, 0)
    tl.store(pairs + place + lanes, -1, mask=place + lanes < end * TILE_ROWS)
