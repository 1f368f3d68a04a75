// Closes the target region that target_begin.h opened.
#if MEMSAVE_EXT_VECTOR_BYTES > 16
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
