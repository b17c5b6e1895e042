/* cuSPARSE, cuBLAS and Sputnik as far as the baselines call them, on the CPU: "device" addresses are the host's.
 *
 * The prototypes are those of cusparse.h, cublas_api.h (CUDA 13.0) and docs/benchmarking.md, so that an argument of a
 * wrong type, size or place gives a wrong product or a status. Compile with -DSTREAM=..., the only stream accepted.
 */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

typedef int status_t;
typedef struct { int64_t rows, cols, nnz; const int32_t *offsets, *indices; const void *values; void *active; int type; } csr_t;
typedef struct { int64_t rows, cols, ld; void *values; int type; } dense_t;

/* cudaDataType: CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF. */
static int known(int type) { return type == 0 || type == 2 || type == 14; }
static float read_element(const void *from, size_t at, int type) {
    if (type == 0) return ((const float *)from)[at];
    if (type == 2) return (float)((const _Float16 *)from)[at];
    union { uint32_t bits; float real; } word = {(uint32_t)((const uint16_t *)from)[at] << 16};
    return word.real;
}
static void write_element(void *to, size_t at, int type, float value) {
    if (type == 0) ((float *)to)[at] = value;
    else if (type == 2) ((_Float16 *)to)[at] = (_Float16)value;
    else {
        union { float real; uint32_t bits; } word = {value};
        ((uint16_t *)to)[at] = (uint16_t)((word.bits + 0x7fff + (word.bits >> 16 & 1)) >> 16);
    }
}

static int alive, preprocessed, refused;
int fake_alive(void) { return alive; }
int fake_preprocessed(void) { return preprocessed; }
void fake_refuse(int algorithm) { refused = algorithm; }

static void *counted(size_t size) { alive++; return calloc(1, size); }
static status_t released(const void *made) { alive--; free((void *)made); return 0; }

status_t cusparseCreate(void **handle) { *handle = counted(sizeof(void *)); return 0; }
status_t cusparseDestroy(void *handle) { return released(handle); }
status_t cusparseGetVersion(void *handle, int *version) { *version = 12603; return handle ? 0 : 1; }
status_t cusparseSetStream(void *handle, void *stream) { *(void **)handle = stream; return 0; }
const char *cusparseGetErrorName(status_t status) { return status == 10 ? "CUSPARSE_STATUS_NOT_SUPPORTED" : "CUSPARSE_STATUS_INVALID_VALUE"; }

status_t cusparseCreateCsr(csr_t **made, int64_t rows, int64_t cols, int64_t nnz, void *offsets, void *indices,
                           void *values, int offsets_type, int indices_type, int base, int value_type) {
    if (offsets_type != 2 || indices_type != 2 || base != 0 || !known(value_type)) return 3;
    *made = counted(sizeof(csr_t));
    **made = (csr_t){rows, cols, nnz, offsets, indices, values, NULL, value_type};
    return 0;
}
status_t cusparseDestroySpMat(const csr_t *a) { return released(a); }

status_t cusparseCreateDnMat(dense_t **made, int64_t rows, int64_t cols, int64_t ld, void *values, int value_type, int order) {
    if (!known(value_type) || order != 2 || ld < cols) return 3;
    *made = counted(sizeof(dense_t));
    **made = (dense_t){rows, cols, ld, values, value_type};
    return 0;
}
status_t cusparseDestroyDnMat(const dense_t *matrix) { return released(matrix); }

static status_t acceptable(void *handle, int op_a, int op_b, const csr_t *a, const dense_t *b, const dense_t *c, int type, int algorithm) {
    if (*(void **)handle != (void *)STREAM || op_a || op_b || type != 0 || (algorithm != 6 && algorithm != 12)) return 3;
    if (a->cols != b->rows || a->rows != c->rows || b->cols != c->cols) return 3;
    if (a->type != b->type || a->type != c->type) return 3;
    return algorithm == refused ? 10 : 0;
}
status_t cusparseSpMM_bufferSize(void *handle, int op_a, int op_b, const void *alpha, const csr_t *a, const dense_t *b,
                                 const void *beta, dense_t *c, int type, int algorithm, size_t *size) {
    *size = 4096;
    return acceptable(handle, op_a, op_b, a, b, c, type, algorithm);
}
status_t cusparseSpMM_preprocess(void *handle, int op_a, int op_b, const void *alpha, csr_t *a, const dense_t *b,
                                 const void *beta, dense_t *c, int type, int algorithm, void *buffer) {
    preprocessed++;
    a->active = buffer;
    for (int i = 0; i < 4096; i++) ((char *)buffer)[i] = 1;
    return acceptable(handle, op_a, op_b, a, b, c, type, algorithm);
}
static void multiply(const csr_t *a, const void *b, void *c, int64_t n, int64_t ldb, int64_t ldc, float alpha, float beta) {
    for (int64_t row = 0; row < a->rows; row++)
        for (int64_t column = 0; column < n; column++) {
            double sum = 0;
            for (int32_t i = a->offsets[row]; i < a->offsets[row + 1]; i++)
                sum += (double)read_element(a->values, i, a->type) * read_element(b, a->indices[i] * ldb + column, a->type);
            size_t at = row * ldc + column;
            write_element(c, at, a->type, (float)(alpha * sum + (beta == 0 ? 0 : beta * read_element(c, at, a->type))));
        }
}
status_t cusparseSpMM(void *handle, int op_a, int op_b, const void *alpha, const csr_t *a, const dense_t *b,
                      const void *beta, dense_t *c, int type, int algorithm, void *buffer) {
    if (a->active != buffer) return 3;
    multiply(a, b->values, c->values, b->cols, b->ld, c->ld, *(const float *)alpha, *(const float *)beta);
    return acceptable(handle, op_a, op_b, a, b, c, type, algorithm);
}

typedef struct { void *stream, *workspace; size_t size; int mode; } blas_t;
status_t cublasCreate_v2(blas_t **handle) { *handle = counted(sizeof(blas_t)); (*handle)->mode = -1; return 0; }
status_t cublasDestroy_v2(blas_t *handle) { return released(handle); }
status_t cublasGetVersion_v2(blas_t *handle, int *version) { *version = 130002; return handle ? 0 : 1; }
status_t cublasSetStream_v2(blas_t *handle, void *stream) { handle->stream = stream; handle->workspace = NULL; return 0; }
status_t cublasSetWorkspace_v2(blas_t *handle, void *workspace, size_t size) {
    handle->workspace = workspace;
    handle->size = size;
    return 0;
}
status_t cublasSetMathMode(blas_t *handle, int mode) { handle->mode = mode; return 0; }
const char *cublasGetStatusName(status_t status) { return "CUBLAS_STATUS_INVALID_VALUE"; }

/* 10 bits behind the point, the others cut off. */
static float tf32(float value) {
    union { float real; uint32_t bits; } word = {value};
    word.bits &= 0xffffe000u;
    return word.real;
}
status_t cublasGemmEx(blas_t *handle, int op_a, int op_b, int m, int n, int k, const void *alpha, const void *A, int a_type,
                      int lda, const void *B, int b_type, int ldb, const void *beta, void *C, int c_type, int ldc,
                      int compute, int algorithm) {
    if (handle->stream != (void *)STREAM || !handle->workspace || handle->size < (4 << 20) || handle->mode != 0) return 7;
    if (op_a || op_b || !known(a_type) || a_type != b_type || a_type != c_type || algorithm != -1 || lda < m || ldb < k || ldc < m) return 7;
    if (compute != 68 && (compute != 77 || a_type != 0)) return 7;
    for (int column = 0; column < n; column++)
        for (int row = 0; row < m; row++) {
            double sum = 0;
            for (int i = 0; i < k; i++) {
                float left = read_element(A, row + (size_t)i * lda, a_type);
                float right = read_element(B, i + (size_t)column * ldb, a_type);
                sum += compute == 77 ? (double)tf32(left) * tf32(right) : (double)left * right;
            }
            size_t at = row + (size_t)column * ldc;
            float scale = *(const float *)beta, old = scale == 0 ? 0 : scale * read_element(C, at, a_type);
            write_element(C, at, a_type, (float)(*(const float *)alpha * sum + old));
        }
    return 0;
}

int sputnik_cuda_spmm(int m, int k, int n, int nonzeros, const int *row_indices, const float *values,
                      const int *row_offsets, const int *column_indices, const float *dense_matrix,
                      float *output_matrix, void *stream) {
    csr_t a = {m, k, nonzeros, row_offsets, column_indices, values, NULL, 0};
    if (stream != (void *)STREAM || row_offsets[m] != nonzeros) return 1;
    for (int i = 0; i + 1 < m; i++) { /* longest rows first, each once */
        int row = row_indices[i], next = row_indices[i + 1];
        if (row_offsets[row + 1] - row_offsets[row] < row_offsets[next + 1] - row_offsets[next]) return 2;
    }
    multiply(&a, dense_matrix, output_matrix, n, n, n, 1, 0);
    return 0;
}
