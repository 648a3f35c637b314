"""The kernel of `pallas_gpu` in Triton's language; this file imports triton, so it is loaded only by who needs it.

Raw pointers and masks: queries of any number and width come as they are, without padding.
"""

# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportMissingImports=false
import triton
import triton.language as tl

__all__ = ["ffd_decode_kernel"]


@triton.jit
def ffd_decode_kernel(
    count_ptr,  # int32 [B]
    threshold_ptr,  # float32 [B, H, R]
    q_ptr,  # [B, H, R, D]
    code_ptr,  # uint8 [B, H, T, BYTES]
    scale_ptr,  # float32 [B, H, NB, D]
    resid_ptr,  # [B, H, T, D]
    v_ptr,  # [B, H, T, DV]
    m_ptr,  # float32 [S, B, H, R]
    l_ptr,  # float32 [S, B, H, R]
    acc_ptr,  # float32 [S, B, H, R, DV]
    kept_ptr,  # int32 [B, H, NB]
    R: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BYTES: tl.constexpr,
    NB: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    PER_SPLIT: tl.constexpr,
    SOFTMAX_SCALE: tl.constexpr,
    CERTIFIED: tl.constexpr,
    BOUND_PER_SCALE: tl.constexpr,
    BOUND_CONSTANT: tl.constexpr,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,  # the sizes below are powers of two, at least 16
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BYTE_COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One split of one KV head; grid (S, H, B)."""
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    at = (row * heads + head).to(tl.int64)
    product = tl.float32 if EXACT else tl.bfloat16
    PER_BYTE: tl.constexpr = 8 // BITS
    Z: tl.constexpr = (2**BITS - 1) / 2

    r = tl.arange(0, ROWS)
    channel = tl.arange(0, CHANNELS)
    column = tl.arange(0, COLUMNS)
    byte = tl.arange(0, BYTE_COLUMNS)
    token = tl.arange(0, TOKENS)
    # A row that only pads never keeps a block.
    threshold = tl.load(threshold_ptr + at * R + r, mask=r < R, other=float("inf"))
    q_at = q_ptr + at * R * D + r[:, None] * D
    q_mask = (r < R)[:, None]
    q = tl.load(q_at + channel[None, :], mask=q_mask & (channel < D)[None, :], other=0.0).to(product)

    m = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    first = split * PER_SPLIT
    last = tl.minimum(first + PER_SPLIT, tl.load(count_ptr + row))
    for n in range(first, last):
        key = at * NB * BLOCK + n * BLOCK + token.to(tl.int64)
        code = tl.load(
            code_ptr + key[:, None] * BYTES + byte[None, :],
            mask=(token < BLOCK)[:, None] & (byte < BYTES)[None, :],
            other=0,
        ).to(tl.int32)
        a = tl.zeros((ROWS, TOKENS), tl.float32)
        zero = tl.zeros((ROWS,), tl.float32)
        error = tl.zeros((ROWS,), tl.float32)
        for i in tl.static_range(PER_BYTE):
            here = byte * PER_BYTE + i
            scale = tl.load(scale_ptr + (at * NB + n) * D + here, mask=here < D, other=0.0)
            x = tl.load(q_at + here[None, :], mask=q_mask & (here < D)[None, :], other=0.0)
            x = x.to(tl.float32) * SOFTMAX_SCALE
            qs = (x * scale[None, :]).to(product)
            level = ((code >> (BITS * i)) & (2**BITS - 1)).to(tl.float32).to(product)
            a += tl.dot(qs, tl.trans(level), input_precision="ieee")
            zero += tl.sum(qs.to(tl.float32), axis=1)
            if CERTIFIED:
                bound = BOUND_PER_SCALE * scale + BOUND_CONSTANT
                error += tl.sum(tl.abs(x) * bound[None, :], axis=1)
        a -= Z * zero[:, None]
        a = tl.where((token < BLOCK)[None, :], a, float("-inf"))
        top = tl.max(a, axis=1) + error
        keep = tl.max(tl.where(top < threshold, 0, 1), axis=0)
        tl.store(kept_ptr + at * NB + n, keep)
        if keep > 0:
            resid = tl.load(
                resid_ptr + key[:, None] * D + channel[None, :],
                mask=(token < BLOCK)[:, None] & (channel < D)[None, :],
                other=0.0,
            )
            resid = resid.to(tl.float32).to(product)
            s = a + tl.dot(q, tl.trans(resid), input_precision="ieee") * SOFTMAX_SCALE
            new = tl.maximum(m, tl.max(s, axis=1))
            p = tl.exp(s - new[:, None])
            old = tl.exp(m - new)
            v = tl.load(
                v_ptr + key[:, None] * DV + column[None, :],
                mask=(token < BLOCK)[:, None] & (column < DV)[None, :],
                other=0.0,
            ).to(product)
            total = total * old + tl.sum(p, axis=1)
            acc = acc * old[:, None] + tl.dot(p.to(product), v, input_precision="ieee")
            m = new
    out = (split * tl.num_programs(2) + row).to(tl.int64) * heads + head
    tl.store(m_ptr + out * R + r, m, mask=r < R)
    tl.store(l_ptr + out * R + r, total, mask=r < R)
    tl.store(
        acc_ptr + out * R * DV + r[:, None] * DV + column[None, :],
        acc,
        mask=q_mask & (column < DV)[None, :],
    )
