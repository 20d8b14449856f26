// Kernels that tests/test_ptx_races.py compiles with and without a fault: FAULT_NO_BARRIER, FAULT_NO_WAIT,
// FAULT_WAIT_FOR_LESS, FAULT_ARMS. With NOT_UNDERSTOOD=1 or 2 only one kernel, that the tool must refuse.
#ifndef NOT_UNDERSTOOD

#ifdef FAULT_NO_BARRIER
#define BARRIER
#else
#define BARRIER __syncthreads()
#endif
#ifdef FAULT_NO_WAIT
#define WAIT(n)
#elif defined(FAULT_WAIT_FOR_LESS)
#define WAIT(n) WAIT_GROUP(n + 1)
#else
#define WAIT(n) WAIT_GROUP(n)
#endif
#define COPY(to, from)                                                   \
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(        \
                   static_cast<unsigned>(__cvta_generic_to_shared(to))), \
               "l"(from)                                                 \
               : "memory")
#define COMMIT asm volatile("cp.async.commit_group;" ::: "memory")
#define WAIT_GROUP(n) asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory")
extern __shared__ float4 s[];

__global__ void store_kernel(float4* x) {
  s[threadIdx.x] = x[threadIdx.x];  // store
  BARRIER;
  x[threadIdx.x] = s[blockDim.x - 1 - threadIdx.x];  // load
}

__global__ void warp_kernel(float4* x) {
  s[threadIdx.x] = x[threadIdx.x];  // store
  __syncwarp();
  BARRIER;
  x[threadIdx.x] = s[threadIdx.x ^ 1];  // load
}

__global__ void branch_kernel(float4* x, int n) {
  if (threadIdx.x < 32) {
    s[threadIdx.x] = x[threadIdx.x];  // store
#ifdef FAULT_ARMS
  } else {
#else
  }
  __syncthreads();
  if (threadIdx.x >= 32) {
#endif
    x[threadIdx.x] = s[threadIdx.x - 32];  // load
  }
}

__global__ void uniform_kernel(float4* x, int n) {
  if (n > 3)
    s[threadIdx.x] = x[threadIdx.x];  // store
  else
    x[threadIdx.x] = s[threadIdx.x ^ 1];  // load
}

__global__ void loop_kernel(float4* x, int n) {
  float4 sum = {};
  for (int i = 0; i < n; ++i) {
    s[threadIdx.x] = x[i * blockDim.x + threadIdx.x];  // store
    __syncthreads();
    sum.x += s[blockDim.x - 1 - threadIdx.x].x;  // load
    BARRIER;
  }
  x[threadIdx.x] = sum;
}

__global__ void copy_kernel(float4* x) {
  COPY(&s[threadIdx.x], &x[threadIdx.x]);  // copy
  COMMIT;
  WAIT(0);
  BARRIER;
  x[threadIdx.x] = s[blockDim.x - 1 - threadIdx.x];  // load
}

__global__ void ring_kernel(float4* x, int n) {
  const int t = threadIdx.x, size = blockDim.x;
  float sum = 0;
  for (int i = 0; i < 2; ++i) {
    COPY(&s[i * size + t], &x[i * size + t]);  // copy
    COMMIT;
  }
#pragma unroll 1
  for (int i = 0; i < n; ++i) {
    WAIT(1);
    BARRIER;
    if (i + 2 < n) COPY(&s[(i + 2) % 3 * size + t], &x[(i + 2) * size + t]);  // copy
    COMMIT;
    sum += s[i % 3 * size + (size - 1 - t)].x;  // load
  }
  x[t].x = sum;
}

#elif NOT_UNDERSTOOD == 1

__global__ void generic_kernel(float* x, int n) {
  extern __shared__ float s[];
  float* to = n > 3 ? s : x;
  to[threadIdx.x] = 1;
}

#else

__global__ void named_kernel() {
  asm volatile("bar.sync 1, 64;");
}

#endif
