"""Writes wgmma.inc for wgmma.cu: the instruction wgmma.mma_async of Hopper for each tile width and storage order.

    python3 wgmma.py > wgmma.inc
    nvcc --expt-relaxed-constexpr -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a wgmma.cu -o wgmma -lcuda -lcublas
    ./wgmma
"""

WIDTHS = (128, 160, 192, 256)


def instruction(width, a_transposed, b_transposed):
    """One specialization: `d += a * b` for 64 rows, `width` columns and 16 values of k. `keep` 0 starts from zero."""
    sums = width // 2
    registers = ", ".join(f"%{i}" for i in range(sums))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(sums))
    return f"""template <> struct Mma<{width}, {a_transposed}, {b_transposed}> {{
    static __device__ __forceinline__ void add(float (&d)[{sums}], uint64_t a, uint64_t b, int keep) {{
        asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{sums + 2}, 0;"
                     "wgmma.mma_async.sync.aligned.m64n{width}k16.f32.bf16.bf16 {{{registers}}}, %{sums}, %{sums + 1},"
                     "p, 1, 1, {a_transposed}, {b_transposed}; }}"
                     : {outputs} : "l"(a), "l"(b), "r"(keep));
    }}
}};
"""


print("template <int WIDTH, int A_TRANSPOSED, int B_TRANSPOSED> struct Mma;")
for width in WIDTHS:
    for a in (0, 1):
        for b in (0, 1):
            print(instruction(width, a, b))
