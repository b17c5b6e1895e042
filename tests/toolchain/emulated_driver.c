/* libcuda.so.1 as far as examples/embedding.c calls it: memory is malloc's, a kernel runs in a process of its own.
 *
 * A launch writes B to EMULATED_FOLDER/b, runs EMULATED_COMMAND with what it was called with, and reads C from
 * EMULATED_FOLDER/c. The first call after a failure of that command reports it, as a driver does.
 */
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    char path[4096], entry[1024];
    int shared_bytes; /* that the function was asked for */
} Code;

/* What lies before each allocation; 256 bytes, as a driver aligns. */
typedef union {
    size_t bytes;
    char padding[256];
} Head;

static CUresult failure = CUDA_SUCCESS;

CUresult cuInit(unsigned flags) { return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return *device = ordinal, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    return *context = (CUcontext)(size_t)(device + 1), CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease(CUdevice device) { return device ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT; }
CUresult cuStreamCreate(CUstream *stream, unsigned flags) { return *stream = (CUstream)(size_t)(flags + 1), CUDA_SUCCESS; }
CUresult cuStreamDestroy(CUstream stream) { return stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE; }
CUresult cuStreamSynchronize(CUstream stream) { return stream ? failure : CUDA_ERROR_INVALID_HANDLE; }

CUresult cuGetErrorName(CUresult result, const char **name) {
    *name = result == CUDA_ERROR_FILE_NOT_FOUND ? "CUDA_ERROR_FILE_NOT_FOUND"
            : result == CUDA_ERROR_LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED"
                                                 : "CUDA_ERROR_OF_ANOTHER_NAME";
    return CUDA_SUCCESS;
}

CUresult cuModuleLoad(CUmodule *module, const char *path) {
    Code *code = calloc(1, sizeof *code);
    FILE *file = fopen(path, "rb");
    if (file == NULL) return CUDA_ERROR_FILE_NOT_FOUND;
    fclose(file);
    strncpy(code->path, path, sizeof code->path - 1);
    *module = (CUmodule)code;
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *entry) {
    Code *code = (Code *)module;
    strncpy(code->entry, entry, sizeof code->entry - 1);
    code->shared_bytes = 49152;
    *function = (CUfunction)code;
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_ERROR_INVALID_VALUE;
    ((Code *)function)->shared_bytes = value;
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr *address, size_t bytes) {
    Head *head = aligned_alloc(256, sizeof *head + (bytes + 255) / 256 * 256);
    head->bytes = bytes;
    *address = (CUdeviceptr)(head + 1);
    return CUDA_SUCCESS;
}
CUresult cuMemFree(CUdeviceptr address) { return free((Head *)address - 1), CUDA_SUCCESS; }

CUresult cuMemcpyHtoDAsync(CUdeviceptr there, const void *here, size_t bytes, CUstream stream) {
    return memcpy((void *)there, here, bytes), cuStreamSynchronize(stream);
}
CUresult cuMemcpyDtoHAsync(void *here, CUdeviceptr there, size_t bytes, CUstream stream) {
    return memcpy(here, (void *)there, bytes), cuStreamSynchronize(stream);
}
CUresult cuMemsetD32Async(CUdeviceptr there, unsigned word, size_t count, CUstream stream) {
    for (size_t i = 0; i < count; i++) ((unsigned *)there)[i] = word;
    return cuStreamSynchronize(stream);
}

static int moved(const char *name, CUdeviceptr address, const char *mode) {
    char path[4096];
    size_t bytes = ((Head *)address - 1)->bytes, found = 0;
    FILE *file;
    snprintf(path, sizeof path, "%s/%s", getenv("EMULATED_FOLDER"), name);
    if ((file = fopen(path, mode)) == NULL) return 0;
    found = *mode == 'w' ? fwrite((void *)address, 1, bytes, file) : fread((void *)address, 1, bytes, file);
    fclose(file);
    return found == bytes;
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void **arguments,
                        void **extra) {
    const Code *code = (const Code *)function;
    char command[16384];
    CUdeviceptr b = *(CUdeviceptr *)arguments[0], c = *(CUdeviceptr *)arguments[1];
    if (block_y != 1 || block_z != 1 || extra != NULL || stream == NULL || (int)shared_bytes > code->shared_bytes)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(command, sizeof command, "%s '%s' '%s' %u %u %u %u %u", getenv("EMULATED_COMMAND"), code->path, code->entry,
             grid_x, grid_y, grid_z, block_x, shared_bytes);
    if (!moved("b", b, "wb") || system(command) != 0 || !moved("c", c, "rb")) failure = CUDA_ERROR_LAUNCH_FAILED;
    return CUDA_SUCCESS;
}
