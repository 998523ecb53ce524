// The causal backward in one pass; sm90.cu says the rest.
#define ONE_PASS 1
#define VARIANT_NAME sm90_one_pass
#include "sm90.cu"
