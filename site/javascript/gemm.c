// What JavaScript cannot do fast enough: y += x · w, and x · sigmoid(x), four numbers at a time.
// clang --target=wasm32 -O3 -msimd128 -nostdlib -Wl,--no-entry,--import-memory,--strip-all,-z,stack-size=1024 -o gemm.wasm gemm.c
#include <wasm_simd128.h>

#define LOAD(p) wasm_v128_load(p)
#define MADD(acc, x, w) wasm_f32x4_add(acc, wasm_f32x4_mul(x, w))

// y (m, n) += x (m, k) · w (k, n); ly, lx, lw: floats from one row to the next; n a multiple of 4.
__attribute__((export_name("gemm")))
void gemm(float *y, int ly, const float *x, int lx, const float *w, int lw, int m, int k, int n) {
  int i = 0;
  for (; i + 4 <= m; i += 4) {
    const float *x0 = x + i * lx, *x1 = x0 + lx, *x2 = x1 + lx, *x3 = x2 + lx;
    int j = 0;
    for (; j + 8 <= n; j += 8) {
      float *y0 = y + i * ly + j, *y1 = y0 + ly, *y2 = y1 + ly, *y3 = y2 + ly;
      v128_t a0 = LOAD(y0), a1 = LOAD(y1), a2 = LOAD(y2), a3 = LOAD(y3);
      v128_t b0 = LOAD(y0 + 4), b1 = LOAD(y1 + 4), b2 = LOAD(y2 + 4), b3 = LOAD(y3 + 4);
      const float *v = w + j;
      for (int p = 0; p < k; p++, v += lw) {
        v128_t u = LOAD(v), t = LOAD(v + 4), s;
        s = wasm_f32x4_splat(x0[p]); a0 = MADD(a0, s, u); b0 = MADD(b0, s, t);
        s = wasm_f32x4_splat(x1[p]); a1 = MADD(a1, s, u); b1 = MADD(b1, s, t);
        s = wasm_f32x4_splat(x2[p]); a2 = MADD(a2, s, u); b2 = MADD(b2, s, t);
        s = wasm_f32x4_splat(x3[p]); a3 = MADD(a3, s, u); b3 = MADD(b3, s, t);
      }
      wasm_v128_store(y0, a0); wasm_v128_store(y1, a1); wasm_v128_store(y2, a2); wasm_v128_store(y3, a3);
      wasm_v128_store(y0 + 4, b0); wasm_v128_store(y1 + 4, b1); wasm_v128_store(y2 + 4, b2); wasm_v128_store(y3 + 4, b3);
    }
    for (; j < n; j += 4) {
      float *y0 = y + i * ly + j, *y1 = y0 + ly, *y2 = y1 + ly, *y3 = y2 + ly;
      v128_t a0 = LOAD(y0), a1 = LOAD(y1), a2 = LOAD(y2), a3 = LOAD(y3);
      const float *v = w + j;
      for (int p = 0; p < k; p++, v += lw) {
        v128_t u = LOAD(v);
        a0 = MADD(a0, wasm_f32x4_splat(x0[p]), u); a1 = MADD(a1, wasm_f32x4_splat(x1[p]), u);
        a2 = MADD(a2, wasm_f32x4_splat(x2[p]), u); a3 = MADD(a3, wasm_f32x4_splat(x3[p]), u);
      }
      wasm_v128_store(y0, a0); wasm_v128_store(y1, a1); wasm_v128_store(y2, a2); wasm_v128_store(y3, a3);
    }
  }
  for (; i < m; i++)
    for (int j = 0; j < n; j += 4) {
      v128_t a = LOAD(y + i * ly + j);
      for (int p = 0; p < k; p++) a = MADD(a, wasm_f32x4_splat(x[i * lx + p]), LOAD(w + p * lw + j));
      wasm_v128_store(y + i * ly + j, a);
    }
}

// x · sigmoid(x) in place, n numbers, rounded up to a multiple of 4. e^-x = 2^k · e^r as in kleinlite/cpu.
__attribute__((export_name("silu")))
void silu(float *x, int n) {
#define C(v) wasm_f32x4_const_splat(v)
  for (int i = 0; i < n; i += 4) {
    v128_t v = LOAD(x + i), y = wasm_f32x4_max(wasm_f32x4_min(wasm_f32x4_neg(v), C(88)), C(-87));
    v128_t k = wasm_f32x4_nearest(wasm_f32x4_mul(y, C(1.44269504f)));
    v128_t r = wasm_f32x4_sub(wasm_f32x4_sub(y, wasm_f32x4_mul(k, C(0.693145751953125f))), wasm_f32x4_mul(k, C(1.428606765330187e-06f)));
    v128_t r2 = wasm_f32x4_mul(r, r), p = MADD(C(0.49999231f), C(0.16667115f), r), q = MADD(C(0.041890337f), C(0.0083125015f), r);
    p = wasm_f32x4_add(MADD(wasm_f32x4_add(C(1), r), p, r2), wasm_f32x4_mul(q, wasm_f32x4_mul(r2, r2)));
    p = wasm_f32x4_mul(p, wasm_i32x4_shl(wasm_i32x4_add(wasm_i32x4_trunc_sat_f32x4(k), wasm_i32x4_const_splat(127)), 23));
    wasm_v128_store(x + i, wasm_f32x4_div(v, wasm_f32x4_add(C(1), p)));
  }
}
