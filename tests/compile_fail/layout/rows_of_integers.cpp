// Rows of integers that hold the bits of bf16: they would be read as numbers.
// expect: tessera: rows hold float, fp16, bf16 or fp8; see as_elements
#include <tessera/core/views.hpp>

int main() {
  const std::uint16_t bits[64] = {};
  return tessera::nhd_rows(bits, 1, 1, 64).tokens;
}
