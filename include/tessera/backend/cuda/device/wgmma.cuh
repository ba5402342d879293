// Products of four warps at a time (wgmma), which only sm_90a has.
#pragma once

#include <type_traits>

#include "mma.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

#define TESSERA_FOUR(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])

/// d [64, Columns] = a [64, 16] b [16, Columns], or += if `add`, by four warps; a in registers, b in shared memory. Transposed: b's
/// rows are its depth. Asynchronous: d and a are in use until wait_products.
template <class T, int Columns, bool Transposed>
__device__ __forceinline__ void multiply_async(float (*d)[4], const std::uint32_t (&a)[4], std::uint64_t b,
                                               bool add = true) {
  static_assert(Columns == 64 || Columns == 128);
  if constexpr (Columns == 64 && std::is_same_v<T, bf16>) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %38, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, add, 1, 1, %37;\n}\n"
        : TESSERA_FOUR(0), TESSERA_FOUR(1), TESSERA_FOUR(2), TESSERA_FOUR(3), TESSERA_FOUR(4), TESSERA_FOUR(5),
          TESSERA_FOUR(6), TESSERA_FOUR(7)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(Transposed)), "r"(int(add)));
  } else if constexpr (Columns == 64) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %38, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, add, 1, 1, %37;\n}\n"
        : TESSERA_FOUR(0), TESSERA_FOUR(1), TESSERA_FOUR(2), TESSERA_FOUR(3), TESSERA_FOUR(4), TESSERA_FOUR(5),
          TESSERA_FOUR(6), TESSERA_FOUR(7)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(Transposed)), "r"(int(add)));
  } else if constexpr (std::is_same_v<T, bf16>) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %70, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
        "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
        "%62, %63"
        "}, {%64, %65, %66, %67}, %68, add, 1, 1, %69;\n}\n"
        : TESSERA_FOUR(0), TESSERA_FOUR(1), TESSERA_FOUR(2), TESSERA_FOUR(3), TESSERA_FOUR(4), TESSERA_FOUR(5),
          TESSERA_FOUR(6), TESSERA_FOUR(7), TESSERA_FOUR(8), TESSERA_FOUR(9), TESSERA_FOUR(10), TESSERA_FOUR(11),
          TESSERA_FOUR(12), TESSERA_FOUR(13), TESSERA_FOUR(14), TESSERA_FOUR(15)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(Transposed)), "r"(int(add)));
  } else {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %70, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
        "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
        "%62, %63"
        "}, {%64, %65, %66, %67}, %68, add, 1, 1, %69;\n}\n"
        : TESSERA_FOUR(0), TESSERA_FOUR(1), TESSERA_FOUR(2), TESSERA_FOUR(3), TESSERA_FOUR(4), TESSERA_FOUR(5),
          TESSERA_FOUR(6), TESSERA_FOUR(7), TESSERA_FOUR(8), TESSERA_FOUR(9), TESSERA_FOUR(10), TESSERA_FOUR(11),
          TESSERA_FOUR(12), TESSERA_FOUR(13), TESSERA_FOUR(14), TESSERA_FOUR(15)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(Transposed)), "r"(int(add)));
  }
}
#undef TESSERA_FOUR

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Waits until at most `Pending` of the groups of products committed last are under way.
template <int Pending = 0>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

/// Registers of a thread from here on, for all four warps: fewer than the launch gave, or more, once others have given theirs.
template <int Registers>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

/// Who waits at a numbered barrier, and who only arrives, so many threads together.
__device__ __forceinline__ void wait_at(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive_at(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

/// Products have arrived in `d`: keeps the compiler from moving them before that.
template <int Columns>
__device__ __forceinline__ void settle(float (&d)[Columns][4]) {
#pragma unroll
  for (int i = 0; i < Columns * 4; ++i) asm volatile("" : "+f"(d[i / 4][i % 4])::"memory");
}

}  // namespace cuda
TESSERA_NAMESPACE_END
