// flags: -fno-exceptions
// expect: tessera: exceptions are off; expected a compiler that has them on: errors are thrown; leave -fno-exceptions out
#include <tessera/tessera.hpp>
