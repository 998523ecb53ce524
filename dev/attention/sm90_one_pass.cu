#define ONE_PASS 1
#include "sm90.cu"
