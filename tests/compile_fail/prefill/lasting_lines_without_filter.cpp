// expect: tessera: lines that join what decoding reads need a filter to join; take covering_lines
#include <tessera/attention/dense_decode.hpp>
#include <tessera/layout/dense.hpp>
#include <tessera/prefill/lasting_lines.hpp>
#include <tessera/recipe.hpp>
#include <tessera/schedule/once.hpp>

tessera::recipe<tessera::retain_all, tessera::dense<tessera::bf16, 128>, tessera::retrieve_all, tessera::dense_decode,
                tessera::once, tessera::lasting_lines>
    chosen;
