// expect: tessera: a row format takes head dims 64, 80, 96, 128, 192, 256 and 512
#include <tessera/layout/dense.hpp>

tessera::dense<tessera::bf16, 100> stored;
