// Products of four warps at a time (wgmma), which only sm_90a has.
#pragma once

#include "../../../device/mma.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// Whether the products of four warps take keys of D elements.
template <int D>
inline constexpr bool fits_wide_products = D == 64 || D == 128;

/// Products d [64, 64] of four neighbouring warps, the first of them a multiple of four, 16 rows each: a in registers
/// as mma.cuh's, b [16, 64] in shared memory.
template <class T>
struct wide_product {
  using sums = float[8][4];  // of a warp's rows: eight columns a time, as mma.cuh's

  /// Where the 16 bytes of chunk `chunk` of row `row` of `rows` rows begin, in bytes. Rows have 128 bytes with swizzled
  /// chunks. The memory must begin on 1024 bytes.
  TESSERA_HD static constexpr std::uint32_t offset(int rows, int row, int chunk) {
    return std::uint32_t(chunk / 8 * rows * 128 + row * 128 + ((chunk ^ row) & 7) * 16);
  }
  /// Operand b: row n has column n, 64 of them from a multiple of 8 on. `address` is that of the first row's chunk with
  /// elements k, a multiple of 16.
  __device__ static std::uint64_t operand(std::uint32_t address) {
    return std::uint64_t(address >> 4 & 0x3fffu) | 1ull << 16 | 64ull << 32 | 1ull << 62;
  }
  /// Makes writes to shared memory visible to products. Called before a barrier.
  __device__ static void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

  __device__ static void begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
  /// d = a b, or d += a b where `add`. Asynchronous: d and a are in use until `finish`.
  __device__ __forceinline__ static void multiply(sums& d, const std::uint32_t (&a)[4], std::uint64_t b, bool add) {
    if constexpr (std::is_same_v<T, bf16>) {
      asm volatile(
          "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
          "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
          "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
          "%23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, add, 1, 1, 0;\n}\n"
          : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
            "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]),
            "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]),
            "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),
            "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));
    } else {
      asm volatile(
          "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
          "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
          "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
          "%23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, add, 1, 1, 0;\n}\n"
          : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
            "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]),
            "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]),
            "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),
            "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));
    }
  }
  __device__ static void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
  __device__ __forceinline__ static void finish(sums& d) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < 32; ++i) asm volatile("" : "+f"(d[i / 4][i % 4])::"memory");  // nothing moves before this
  }
};

}  // namespace cuda
TESSERA_NAMESPACE_END
