// expect: tessera: a row format takes head dims 64, 80, 96, 128, 192 and 256
#include <tessera/layout/dense.hpp>

tessera::dense<tessera::bf16, 100> stored;
