/* Vectors of one processor level, for the loops of code_body.h, which says what an includer defines. No include guard. */
typedef float NAME(vec) __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t NAME(uvec) __attribute__((vector_size(4 * WIDTH)));
typedef int32_t NAME(ivec) __attribute__((vector_size(4 * WIDTH)));
#define VEC NAME(vec)
#define UVEC NAME(uvec)
#define IVEC NAME(ivec)
#define INLINE TARGET static inline __attribute__((always_inline))
#define KERNEL TARGET static
#if WIDTH == 16
#define PARTNERS(v, h)                                                                                       \
    __builtin_shufflevector(v, v, 0 ^ (h), 1 ^ (h), 2 ^ (h), 3 ^ (h), 4 ^ (h), 5 ^ (h), 6 ^ (h), 7 ^ (h),    \
                            8 ^ (h), 9 ^ (h), 10 ^ (h), 11 ^ (h), 12 ^ (h), 13 ^ (h), 14 ^ (h), 15 ^ (h))
#elif WIDTH == 8
#define PARTNERS(v, h)                                                                                       \
    __builtin_shufflevector(v, v, 0 ^ (h), 1 ^ (h), 2 ^ (h), 3 ^ (h), 4 ^ (h), 5 ^ (h), 6 ^ (h), 7 ^ (h))
#else
#define PARTNERS(v, h) __builtin_shufflevector(v, v, 0 ^ (h), 1 ^ (h), 2 ^ (h), 3 ^ (h))
#endif
