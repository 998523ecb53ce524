#define ONE_PASS 1
#define VARIANT_NAME sm90_one_pass
#include "sm90.cu"
