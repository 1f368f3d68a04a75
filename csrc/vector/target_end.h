// Closes the target region of target_avx2.h or target_avx512.h.
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
