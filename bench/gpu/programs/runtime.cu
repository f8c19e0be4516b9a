// A program on NVIDIA's runtime, built by nvcc: allocates up to and beyond LIMIT bytes by three calls, and computes.
// usage: runtime LIMIT [wait]. Prints the results as one line of JSON. Its exit code is 0 whatever they are. With `wait` it keeps
// its context until stdin has a line or has ended.

#include <cstdio>

__global__ void increment(unsigned long long *numbers, int count) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) numbers[at] += at;
}

static unsigned long long number(const char *text) {
    unsigned long long value = 0;
    for (; *text >= '0' && *text <= '9'; text++) value = 10 * value + (unsigned long long)(*text - '0');
    return value;
}

int main(int argc, char **argv) {
    const unsigned long long limit = argc > 1 ? number(argv[1]) : 0;
    size_t free_bytes = 0, total = 0;
    void *pointer = nullptr;
    int version = 0;
    cudaRuntimeGetVersion(&version);
    const int info = cudaMemGetInfo(&free_bytes, &total);
    // LIMIT is a share's memory; without a share it is small, so that the GPU has that much managed memory.
    const int plain = cudaMalloc(&pointer, limit + 1);
    const int managed = cudaMallocManaged(&pointer, limit + 1);
    const int ordered = cudaMallocAsync(&pointer, limit + 1, 0);
    const int last = cudaGetLastError();
    const int half = cudaMalloc(&pointer, limit / 2);
    const int freed = cudaFree(pointer);

    const int count = 1000;
    unsigned long long *numbers = nullptr, sum = 0, back[count];
    const int small = cudaMalloc(&numbers, sizeof back);
    cudaMemset(numbers, 0, sizeof back);
    increment<<<4, 256>>>(numbers, count);
    const int launched = cudaGetLastError();
    const int copied = cudaMemcpy(back, numbers, sizeof back, cudaMemcpyDeviceToHost);
    for (int at = 0; copied == 0 && at < count; at++) sum += back[at];
    cudaFree(numbers);
    printf("{\"version\": %d, \"info\": %d, \"total\": %llu, \"plain\": %d, \"managed\": %d, \"ordered\": %d, \"last\": %d, "
           "\"half\": %d, \"freed\": %d, \"small\": %d, \"launched\": %d, \"copied\": %d, \"sum\": %llu}\n",
           version, info, (unsigned long long)total, plain, managed, ordered, last, half, freed, small, launched, copied, sum);
    fflush(stdout);
    if (argc > 2) getchar();
    return 0;
}
