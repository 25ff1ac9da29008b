//! The matrix products of cuBLAS.
use crate::count::count;
use crate::memory::check;
use crate::object::{create, destroyers};
use crate::stream::push;
use half::{bf16, f16};
use std::ffi::{c_int, c_longlong, c_void};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// A `cublasStatus_t`.
pub(crate) type Status = c_int;
pub(crate) const SUCCESS: Status = 0;
const INVALID_VALUE: Status = 7;
const EXECUTION_FAILED: Status = 13;
const NOT_SUPPORTED: Status = 15;

/// `CUBLAS_COMPUTE_16F`, `CUBLAS_COMPUTE_64F` and their pedantic variants determine the type of alpha and beta;
/// otherwise it is f32.
const COMPUTE_16F: [c_int; 2] = [64, 65];
const COMPUTE_64F: [c_int; 2] = [70, 71];

/// A `cublasHandle_t`.
#[derive(Default)]
struct Handle {
    /// The handle of its stream.
    stream: AtomicUsize,
    /// Whether scalars are read on the GPU, when a product is computed, or at once on the host.
    has_device_scalars: AtomicBool,
}

destroyers!(cublasDestroy_v2: Handle);

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasCreate_v2(handle: *mut *mut c_void) -> Status {
    if crate::driver::context_device().is_none() {
        return 1; // NOT_INITIALIZED
    }
    // SAFETY: guaranteed by the caller.
    unsafe { create(handle, Handle::default()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasSetStream_v2(handle: *mut c_void, stream: *mut c_void) -> Status {
    // SAFETY: the handle came from `cublasCreate_v2`.
    unsafe { &*handle.cast::<Handle>() }.stream.store(stream as usize, Ordering::Relaxed);
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasSetPointerMode_v2(handle: *mut c_void, mode: c_int) -> Status {
    // SAFETY: the handle came from `cublasCreate_v2`.
    unsafe { &*handle.cast::<Handle>() }.has_device_scalars.store(mode == 1, Ordering::Relaxed);
    SUCCESS
}

/// A `cudaDataType` that matrices may have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum DType {
    F32,
    F64,
    F16,
    BF16,
}

impl DType {
    pub(crate) fn new(number: c_int) -> Option<Self> {
        [(0, Self::F32), (1, Self::F64), (2, Self::F16), (14, Self::BF16)]
            .into_iter()
            .find_map(|(known, dtype)| (known == number).then_some(dtype))
    }

    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
        }
    }

    /// # Safety
    /// The element must exist.
    pub(crate) unsafe fn read(self, start: u64, index: usize) -> f64 {
        let address = start as usize + index * self.bytes();
        // SAFETY: the caller guarantees that the element exists; elements are aligned, as CUDA requires.
        unsafe {
            match self {
                Self::F64 => *(address as *const f64),
                Self::F32 => (*(address as *const f32)).into(),
                Self::F16 => (*(address as *const f16)).into(),
                Self::BF16 => (*(address as *const bf16)).into(),
            }
        }
    }

    /// # Safety
    /// The element must exist, and no other code may use it.
    pub(crate) unsafe fn write(self, start: u64, index: usize, value: f64) {
        let address = start as usize + index * self.bytes();
        // SAFETY: guaranteed by the caller; elements are aligned, as CUDA requires.
        unsafe {
            match self {
                Self::F64 => *(address as *mut f64) = value,
                Self::F32 => *(address as *mut f32) = value as f32,
                Self::F16 => *(address as *mut f16) = f16::from_f64(value),
                Self::BF16 => *(address as *mut bf16) = bf16::from_f64(value),
            }
        }
    }
}

/// A batch of matrices in column-major order.
#[derive(Clone, Copy)]
pub(crate) struct Matrices {
    pub(crate) address: u64,
    pub(crate) dtype: DType,
    /// The number of rows in memory.
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) leading: usize,
    /// The number of elements from one matrix to the next.
    pub(crate) stride: usize,
    pub(crate) transposed: bool,
}

impl Matrices {
    fn check(&self, batch: usize, what: &str) {
        if self.rows * self.columns > 0 {
            let last = (batch - 1) * self.stride + (self.columns - 1) * self.leading + self.rows;
            check(self.address, last * self.dtype.bytes(), what);
        }
    }

    /// Loads one matrix without gaps in column-major order, transposed if necessary.
    ///
    /// # Safety
    /// The matrix must be allocated.
    unsafe fn load<T: Number>(&self, number: usize) -> Vec<T> {
        let start = number * self.stride;
        // SAFETY: guaranteed by the caller.
        let element =
            |row, column| T::from(unsafe { self.dtype.read(self.address, start + column * self.leading + row) });
        let (rows, columns) = (self.rows, self.columns);
        if self.transposed {
            (0..rows).flat_map(|row| (0..columns).map(move |column| element(row, column))).collect()
        } else {
            (0..columns).flat_map(|column| (0..rows).map(move |row| element(row, column))).collect()
        }
    }
}

/// The type in which sums are computed.
trait Number: Copy + Default {
    fn from(value: f64) -> Self;
    fn to(self) -> f64;
    fn multiply_add(sums: &mut [Self], column: &[Self], factor: Self);
}

macro_rules! number {
    ($type:ty) => {
        impl Number for $type {
            fn from(value: f64) -> Self {
                value as Self
            }

            fn to(self) -> f64 {
                self.into()
            }

            #[inline(always)]
            fn multiply_add(sums: &mut [Self], column: &[Self], factor: Self) {
                for (sum, value) in sums.iter_mut().zip(column) {
                    *sum += value * factor;
                }
            }
        }
    };
}
number!(f32);
number!(f64);

/// What a product is multiplied by, or its old value.
#[derive(Clone, Copy)]
pub(crate) enum Scalar {
    Host(f64),
    /// Its address on the GPU.
    Device(u64, DType),
}

impl Scalar {
    /// Reads the number, on the stream.
    fn get(self) -> f64 {
        match self {
            Self::Host(value) => value,
            Self::Device(address, dtype) => {
                check(address, dtype.bytes(), "a scalar of a product");
                // SAFETY: the memory is allocated.
                unsafe { dtype.read(address, 0) }
            }
        }
    }
}

const PART: usize = 1024;
/// The largest batch.
const MOST: usize = 65_535;

/// What cuBLASLt does beside a product, with numbers of C's type at an address.
#[derive(Clone, Copy)]
pub(crate) enum Epilogue {
    /// Adds a number to each row of C.
    Bias(u64),
    /// Writes the sums of the columns of B.
    RowSums(u64),
}

pub(crate) struct Product {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) batch: usize,
    pub(crate) alpha: Scalar,
    pub(crate) beta: Scalar,
    pub(crate) a: Matrices,
    pub(crate) b: Matrices,
    pub(crate) c: Matrices,
    pub(crate) epilogue: Option<Epilogue>,
}

impl Product {
    /// # Safety
    /// The matrices must be allocated, and no other code may use `c`.
    unsafe fn calculate<T: Number>(&self) {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: guaranteed by the caller, and the processor has AVX2.
            return unsafe { self.calculate_avx2::<T>() };
        }
        // SAFETY: guaranteed by the caller.
        unsafe { self.calculate_as::<T>() }
    }

    /// # Safety
    /// See [`Self::calculate`].
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    unsafe fn calculate_avx2<T: Number>(&self) {
        // SAFETY: guaranteed by the caller.
        unsafe { self.calculate_as::<T>() }
    }

    /// # Safety
    /// See [`Self::calculate`].
    #[inline(always)]
    unsafe fn calculate_as<T: Number>(&self) {
        let [alpha, beta] = [self.alpha, self.beta].map(Scalar::get);
        let of_c = self.c.dtype;
        for number in 0..self.batch {
            // SAFETY: guaranteed by the caller.
            let (a, b) = unsafe { (self.a.load::<T>(number), self.b.load::<T>(number)) };
            let mut sums = vec![T::default(); self.m];
            for column in 0..self.n {
                sums.fill(T::default());
                if let Some(Epilogue::RowSums(to)) = self.epilogue {
                    let values = &b[column * self.k..(column + 1) * self.k];
                    // SAFETY: guaranteed by the caller.
                    unsafe { of_c.write(to, column, values.iter().map(|value| value.to()).sum()) };
                }
                // As many sums as fit into the first-level cache.
                for (part, sums) in sums.chunks_mut(PART).enumerate() {
                    for inner in 0..self.k {
                        let values = &a[inner * self.m + part * PART..][..sums.len()];
                        T::multiply_add(sums, values, b[column * self.k + inner]);
                    }
                }
                let start = number * self.c.stride + column * self.c.leading;
                for (row, sum) in sums.iter().enumerate() {
                    // SAFETY: guaranteed by the caller. C is not read if beta is zero.
                    unsafe {
                        let old = if beta == 0. { 0. } else { beta * of_c.read(self.c.address, start + row) };
                        let bias = match self.epilogue {
                            Some(Epilogue::Bias(bias)) => of_c.read(bias, row),
                            _ => 0.,
                        };
                        of_c.write(self.c.address, start + row, alpha * sum.to() + old + bias);
                    }
                }
            }
        }
    }

    /// Enqueues the product, and something before it.
    pub(crate) fn put_on(self, stream: *mut c_void, before: impl FnOnce() + Send + 'static) -> Status {
        // As on GPUs of major version 7.
        if self.batch > MOST {
            return EXECUTION_FAILED;
        }
        if self.m * self.n * self.batch == 0 {
            return SUCCESS;
        }
        if [&self.a, &self.b, &self.c].iter().any(|matrices| matrices.leading < matrices.rows.max(1)) {
            return INVALID_VALUE;
        }
        count("product", 1);
        let pushed = push(stream, move || {
            before();
            self.a.check(self.batch, "matrix A of a product");
            self.b.check(self.batch, "matrix B of a product");
            self.c.check(self.batch, "matrix C of a product");
            match self.epilogue {
                Some(Epilogue::Bias(bias)) => check(bias, self.m * self.c.dtype.bytes(), "the bias of a product"),
                Some(Epilogue::RowSums(to)) => check(to, self.n * self.c.dtype.bytes(), "the sums of a product"),
                None => {}
            }
            // SAFETY: the matrices are allocated; the program guarantees to cuBLAS that nothing else uses C.
            unsafe { if self.c.dtype == DType::F64 { self.calculate::<f64>() } else { self.calculate::<f32>() } }
        });
        if pushed == 0 { SUCCESS } else { EXECUTION_FAILED }
    }
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // cuBLAS's
pub unsafe extern "C" fn cublasGemmStridedBatchedEx(
    handle: *mut c_void,
    a_operation: c_int,
    b_operation: c_int,
    m: c_int,
    n: c_int,
    k: c_int,
    alpha: *const c_void,
    a: *const c_void,
    a_type: c_int,
    a_leading: c_int,
    a_stride: c_longlong,
    b: *const c_void,
    b_type: c_int,
    b_leading: c_int,
    b_stride: c_longlong,
    beta: *const c_void,
    c: *mut c_void,
    c_type: c_int,
    c_leading: c_int,
    c_stride: c_longlong,
    batch: c_int,
    compute_type: c_int,
    _algorithm: c_int,
) -> Status {
    let [Some(a_type), Some(b_type), Some(c_type)] = [a_type, b_type, c_type].map(DType::new) else {
        return NOT_SUPPORTED;
    };
    if [m, n, k, batch].iter().any(|size| *size < 0) {
        return INVALID_VALUE;
    }
    let scalar = if COMPUTE_16F.contains(&compute_type) {
        DType::F16
    } else if COMPUTE_64F.contains(&compute_type) {
        DType::F64
    } else {
        DType::F32
    };
    // SAFETY: the handle came from `cublasCreate_v2`.
    let has_device_scalars = unsafe { &*handle.cast::<Handle>() }.has_device_scalars.load(Ordering::Relaxed);
    let [alpha, beta] = [alpha, beta].map(|address| match has_device_scalars {
        true => Scalar::Device(address as u64, scalar),
        // SAFETY: the pointers refer to the host.
        false => Scalar::Host(unsafe { scalar.read(address as u64, 0) }),
    });
    let [m, n, k, batch] = [m, n, k, batch].map(|size| size as usize);
    let operand = |address: *const c_void, dtype, rows, columns, leading: c_int, stride: c_longlong, transposed| {
        let (rows, columns) = if transposed { (columns, rows) } else { (rows, columns) };
        let (leading, stride) = (leading.max(0) as usize, stride.max(0) as usize);
        Matrices { address: address as u64, dtype, rows, columns, leading, stride, transposed }
    };
    let a = operand(a, a_type, m, k, a_leading, a_stride, a_operation != 0);
    let b = operand(b, b_type, k, n, b_leading, b_stride, b_operation != 0);
    let c = operand(c, c_type, m, n, c_leading, c_stride, false);
    // SAFETY: the handle came from `cublasCreate_v2`.
    let stream = unsafe { &*handle.cast::<Handle>() }.stream.load(Ordering::Relaxed);
    Product { m, n, k, batch, alpha, beta, a, b, c, epilogue: None }.put_on(stream as *mut c_void, || {})
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // cuBLAS's
pub unsafe extern "C" fn cublasDgemmStridedBatched(
    handle: *mut c_void,
    a_operation: c_int,
    b_operation: c_int,
    m: c_int,
    n: c_int,
    k: c_int,
    alpha: *const f64,
    a: *const f64,
    a_leading: c_int,
    a_stride: c_longlong,
    b: *const f64,
    b_leading: c_int,
    b_stride: c_longlong,
    beta: *const f64,
    c: *mut f64,
    c_leading: c_int,
    c_stride: c_longlong,
    batch: c_int,
) -> Status {
    const F64: c_int = 1;
    let (a, b, c) = (a.cast(), b.cast(), c.cast());
    let (alpha, beta) = (alpha.cast(), beta.cast());
    // SAFETY: guaranteed by the caller.
    unsafe {
        cublasGemmStridedBatchedEx(
            handle,
            a_operation,
            b_operation,
            m,
            n,
            k,
            alpha,
            a,
            F64,
            a_leading,
            a_stride,
            b,
            F64,
            b_leading,
            b_stride,
            beta,
            c,
            F64,
            c_leading,
            c_stride,
            batch,
            COMPUTE_64F[0],
            0,
        )
    }
}
