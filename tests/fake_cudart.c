/* libcudart without a GPU: memory is the host's, a copy is a copy, a launch is counted and does nothing.

   FlashInfer's own planners run on it: they ask for the number of processors (132), the capability (9.0) and how many
   blocks fit on one, and copy what they plan. Build it with -Wl,--version-script, as it stands in for libcudart.so.13. */
#include <stddef.h>
#include <string.h>

typedef int status;
typedef struct { unsigned x, y, z; } dim3;
struct config { dim3 grid, block; size_t shared; void *stream; void *attributes; unsigned count; };

static long launches = 0;
static char handle[64];

long fake_launches(void) { return launches; }

status cudaGetDevice(int *device) { *device = 0; return 0; }
status cudaSetDevice(int device) { return 0; }
status cudaGetLastError(void) { return 0; }
status cudaPeekAtLastError(void) { return 0; }
status cudaFuncSetAttribute(const void *function, int attribute, int value) { return 0; }
const char *cudaGetErrorString(status error) { return error ? "fake error" : "no error"; }
const char *cudaGetErrorName(status error) { return error ? "fakeError" : "cudaSuccess"; }

status cudaDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
    case 1: *value = 1024; break;     /* threads of a block */
    case 16: *value = 132; break;     /* processors */
    case 39: *value = 2048; break;    /* threads of a processor */
    case 75: *value = 9; break;       /* capability */
    case 76: *value = 0; break;
    case 81: *value = 233472; break;  /* shared memory of a processor */
    case 97: *value = 232448; break;  /* shared memory that a block may ask for */
    default: *value = 0;
    }
    return 0;
}

status cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *function, int block, size_t shared,
                                                              unsigned flags) {
    int most = 2048 / (block ? block : 1);
    if (shared && 233472 / (int)(shared + 1024) < most) most = 233472 / (int)(shared + 1024);
    *count = most > 0 ? most : 1;
    return 0;
}
status cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *function, int block, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(count, function, block, shared, 0);
}

status cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) { memcpy(to, from, size); return 0; }
status cudaMemsetAsync(void *to, int value, size_t size, void *stream) { memset(to, value, size); return 0; }

status cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, void *stream) {
    launches++;
    return 0;
}
status __cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, void *stream) {
    return cudaLaunchKernel(function, grid, block, arguments, shared, stream);
}
status cudaLaunchKernelExC(const struct config *config, const void *function, void **arguments) {
    return cudaLaunchKernel(function, config->grid, config->block, arguments, config->shared, config->stream);
}

/* What compiled CUDA code calls as it is loaded, and where it launches. */
void **__cudaRegisterFatBinary(void *binary) { return (void **)handle; }
void __cudaRegisterFatBinaryEnd(void **binary) {}
void __cudaUnregisterFatBinary(void **binary) {}
void __cudaRegisterFunction(void **binary, const char *host, char *device, const char *name, int limit, void *thread,
                            void *block, void *block_size, void *grid_size, int *warp) {}
void __cudaRegisterVar(void **binary, char *host, char *device, const char *name, int external, size_t size, int constant,
                       int global) {}
status __cudaGetKernel(void **kernel, const void *function) { *kernel = (void *)function; return 0; }
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) { return 0; }
status __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    memset(grid, 0, sizeof *grid);
    memset(block, 0, sizeof *block);
    *shared = 0;
    return 0;
}
