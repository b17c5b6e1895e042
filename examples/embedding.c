/* Runs every kernel of a folder of `lospmm tune-model` with the CUDA driver alone, and checks what it computes.
 *
 *     cc -O2 -I CUDA/include embedding.c -o embedding -l:libcuda.so.1 -lm
 *     ./embedding kernels layers
 *
 * kernels is the folder; layers has the weights that it was made of, <layer>.npy, float32 in C order. Exits with 1 where
 * a kernel is wrong, with 2 where something fails. It is C11, and C++ as well.
 */
#include <cuda.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LONGEST_NAME 1024
#define LONGEST_PATH 4096
#define CHECKED_COLUMNS ((size_t)16)  /* of C, spread over all of them */
#define SHARED_BYTES_UNASKED 49152u   /* of dynamic shared memory; above, the function is asked for it */

/* Of the terms that are added up: what `lospmm tune` allows too. */
static const double GREATEST_ERROR = 1e-5;

/* A line of kernels.tsv. C (m x n) = A (m x k) x B (k x n): A is in the kernel, B and C are row-major without gaps. */
typedef struct {
    char entry[LONGEST_NAME], folder[LONGEST_NAME], layer[LONGEST_NAME];
    size_t m, k, n;
    unsigned grid[3], block, shared_bytes;
    CUfunction function;
} Kernel;

static void fail(const char *what, const char *why) {
    fprintf(stderr, "embedding: %s: %s\n", what, why);
    exit(2);
}

static void check(CUresult result, const char *what) {
    const char *name = "an error that this driver does not know";
    if (result == CUDA_SUCCESS) return;
    cuGetErrorName(result, &name);
    fail(what, name);
}

static void *allocate(size_t bytes) {
    void *memory = malloc(bytes);
    if (memory == NULL) fail("malloc", "out of memory");
    return memory;
}

/* The next kernel of the table; 0 at its end. The first line, which names the columns, has been read. */
static int next_kernel(FILE *table, Kernel *kernel) {
    char line[4 * LONGEST_NAME];
    int found;
    if (fgets(line, sizeof line, table) == NULL) return 0;
    kernel->layer[0] = '\0'; /* the name may be empty */
    found = sscanf(line, "%1023s %zu %zu %zu %u %u %u %u %u %1023s %1023[^\n]", kernel->entry, &kernel->m, &kernel->k,
                   &kernel->n, &kernel->grid[0], &kernel->grid[1], &kernel->grid[2], &kernel->block,
                   &kernel->shared_bytes, kernel->folder, kernel->layer);
    if (found < 10) fail("kernels.tsv", "a line is not as this program knows them");
    return 1;
}

/* Load the code: once, not for every call. The kernel may be launched as long as its context is there. */
static void load(Kernel *kernel, const char *kernels) {
    char path[LONGEST_PATH];
    CUmodule module;
    snprintf(path, sizeof path, "%s/%s/kernel.cubin", kernels, kernel->folder);
    check(cuModuleLoad(&module, path), path);
    check(cuModuleGetFunction(&kernel->function, module, kernel->entry), kernel->entry);
    if (kernel->shared_bytes > SHARED_BYTES_UNASKED)
        check(cuFuncSetAttribute(kernel->function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                 (int)kernel->shared_bytes),
              "cuFuncSetAttribute");
}

/* Put the kernel on a stream: this is all that a program has to do for each call. */
static void launch(const Kernel *kernel, CUdeviceptr b, CUdeviceptr c, CUstream stream) {
    void *arguments[] = {&b, &c};
    check(cuLaunchKernel(kernel->function, kernel->grid[0], kernel->grid[1], kernel->grid[2], kernel->block, 1, 1,
                         kernel->shared_bytes, stream, arguments, NULL),
          "cuLaunchKernel");
}

/* A as a dense array, from the .npy file (numpy.lib.format, version 1) that the kernel was tuned from. */
static float *read_weights(const Kernel *kernel, const char *layers) {
    char path[LONGEST_PATH], header[65536] = "", shape[64];
    unsigned char start[10];
    size_t size, count = kernel->m * kernel->k;
    float *weights = (float *)allocate(count * sizeof *weights);
    FILE *file;
    snprintf(path, sizeof path, "%s/%s.npy", layers, kernel->layer);
    snprintf(shape, sizeof shape, "'shape': (%zu, %zu)", kernel->m, kernel->k);
    if ((file = fopen(path, "rb")) == NULL) fail(path, "cannot be opened");
    if (fread(start, 1, sizeof start, file) != sizeof start || memcmp(start, "\x93NUMPY\x01", 7) != 0)
        fail(path, "is no .npy file of version 1");
    size = start[8] + 256u * start[9];
    if (fread(header, 1, size, file) != size || strstr(header, "'<f4'") == NULL || strstr(header, "False") == NULL ||
        strstr(header, shape) == NULL)
        fail(path, "does not hold float32 in C order, in the shape of the kernel");
    if (fread(weights, sizeof *weights, count, file) != count) fail(path, "is too short");
    fclose(file);
    return weights;
}

/* The greatest error of C over some columns, relative to |A| |B|; infinite where it is no number. */
static double greatest_error(const Kernel *kernel, const float *a, const float *b, const float *c) {
    double greatest = 0;
    size_t columns = kernel->n < CHECKED_COLUMNS ? kernel->n : CHECKED_COLUMNS;
    for (size_t number = 0; number < columns; number++) {
        size_t column = columns == 1 ? 0 : number * (kernel->n - 1) / (columns - 1);
        for (size_t row = 0; row < kernel->m; row++) {
            double sum = 0, size = 0, error;
            for (size_t i = 0; i < kernel->k; i++) {
                double term = (double)a[row * kernel->k + i] * b[i * kernel->n + column];
                sum += term;
                size += fabs(term);
            }
            error = fabs(c[row * kernel->n + column] - sum);
            if (isnan(error)) return INFINITY;
            if (error > 0) error = size > 0 ? error / size : INFINITY;
            if (error > greatest) greatest = error;
        }
    }
    return greatest;
}

/* Run a kernel on random numbers from -1 to 1 and compare. C is all ones before: what is not written shows. */
static double error_of(const Kernel *kernel, const char *layers, CUstream stream) {
    size_t b_count = kernel->k * kernel->n, c_count = kernel->m * kernel->n;
    float *a = read_weights(kernel, layers), *b = (float *)allocate(b_count * sizeof *b),
          *c = (float *)allocate(c_count * sizeof *c);
    unsigned state = 1;
    CUdeviceptr b_there, c_there;
    double error;
    for (size_t i = 0; i < b_count; i++) {
        state = state * 1664525u + 1013904223u; /* Numerical Recipes' generator: the same on every machine */
        b[i] = (float)(state >> 8) / 8388608.0f - 1.0f;
    }
    check(cuMemAlloc(&b_there, b_count * sizeof *b), "cuMemAlloc");
    check(cuMemAlloc(&c_there, c_count * sizeof *c), "cuMemAlloc");
    check(cuMemcpyHtoDAsync(b_there, b, b_count * sizeof *b, stream), "cuMemcpyHtoDAsync");
    check(cuMemsetD32Async(c_there, 0x3f800000u, c_count, stream), "cuMemsetD32Async");
    launch(kernel, b_there, c_there, stream);
    check(cuMemcpyDtoHAsync(c, c_there, c_count * sizeof *c, stream), "cuMemcpyDtoHAsync");
    check(cuStreamSynchronize(stream), kernel->layer);
    error = greatest_error(kernel, a, b, c);
    check(cuMemFree(b_there), "cuMemFree");
    check(cuMemFree(c_there), "cuMemFree");
    free(a);
    free(b);
    free(c);
    return error;
}

int main(int count, char **words) {
    char path[LONGEST_PATH], heads[LONGEST_NAME];
    FILE *table;
    Kernel kernel;
    CUdevice device;
    CUcontext context;
    CUstream stream;
    int kernels = 0, wrong = 0;
    if (count != 3) fail("usage", "embedding KERNELS LAYERS");
    snprintf(path, sizeof path, "%s/kernels.tsv", words[1]);
    if ((table = fopen(path, "r")) == NULL || fgets(heads, sizeof heads, table) == NULL) fail(path, "cannot be read");

    check(cuInit(0), "cuInit");
    check(cuDeviceGet(&device, 0), "cuDeviceGet");
    check(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
    check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
    check(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    for (; next_kernel(table, &kernel); kernels++) {
        double error;
        load(&kernel, words[1]);
        error = error_of(&kernel, words[2], stream);
        printf("%s: %zu x %zu, n %zu, relative error %.1e\n", kernel.layer, kernel.m, kernel.k, kernel.n, error);
        if (!(error <= GREATEST_ERROR)) wrong++;
    }
    fclose(table);
    check(cuStreamDestroy(stream), "cuStreamDestroy");
    check(cuDevicePrimaryCtxRelease(device), "cuDevicePrimaryCtxRelease");
    printf("%d kernels, %d wrong\n", kernels, wrong);
    return wrong > 0;
}
