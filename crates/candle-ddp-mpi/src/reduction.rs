//! Reductions as MPI takes them. The library adds and multiplies numbers that C knows; its own operations for f16 and bf16, and
//! for the minimum and maximum of numbers that may be NaN, are defined here.
use crate::library::{Library, MpiError};
use candle_core::DType;
use candle_ddp::ReduceOp;
use candle_ddp_simd::{Arithmetic, Number, vectorise};
use half::{bf16, f16};
use mpi::ffi::{
    MPI_Datatype, MPI_Op, MPI_Op_create, RSMPI_DOUBLE, RSMPI_FLOAT, RSMPI_INT64_T, RSMPI_MAX, RSMPI_MIN, RSMPI_PROD,
    RSMPI_SUM, RSMPI_UINT8_T, RSMPI_UINT16_T, RSMPI_UINT32_T,
};
use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

/// The datatype of a dtype that the engine has checked. f16 and bf16 are two bytes to MPI.
pub(crate) fn datatype(dtype: DType) -> MPI_Datatype {
    // SAFETY: constants.
    unsafe {
        match dtype {
            DType::F32 => RSMPI_FLOAT,
            DType::F64 => RSMPI_DOUBLE,
            DType::F16 | DType::BF16 => RSMPI_UINT16_T,
            DType::I64 => RSMPI_INT64_T,
            DType::U32 => RSMPI_UINT32_T,
            _ => RSMPI_UINT8_T,
        }
    }
}

/// The operation for a reduction of `dtype`. An average is a sum that is [divided](average) at the end.
pub(crate) fn operation(library: &Library, dtype: DType, op: ReduceOp) -> Result<MPI_Op, MpiError> {
    // SAFETY: constants.
    let of_library = unsafe {
        match op {
            ReduceOp::Sum | ReduceOp::Avg => RSMPI_SUM,
            ReduceOp::Min => RSMPI_MIN,
            ReduceOp::Max => RSMPI_MAX,
            ReduceOp::Prod => RSMPI_PROD,
        }
    };
    let is_adding = matches!(op, ReduceOp::Sum | ReduceOp::Avg | ReduceOp::Prod);
    match dtype {
        DType::F16 => own::<f16>(library, &F16, op),
        DType::BF16 => own::<bf16>(library, &BF16, op),
        DType::F32 if !is_adding => own::<f32>(library, &F32, op),
        DType::F64 if !is_adding => own::<f64>(library, &F64, op),
        _ => Ok(of_library),
    }
}

/// The operations of one dtype that were defined so far: the sum, the minimum, the maximum and the product.
type Own = [OnceLock<Result<Handle, MpiError>>; 4];

static F16: Own = [const { OnceLock::new() }; 4];
static BF16: Own = [const { OnceLock::new() }; 4];
static F32: Own = [const { OnceLock::new() }; 4];
static F64: Own = [const { OnceLock::new() }; 4];

struct Handle(MPI_Op);

// SAFETY: MPI's handles are valid on every thread.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

fn own<N: Number>(library: &Library, defined: &'static Own, op: ReduceOp) -> Result<MPI_Op, MpiError> {
    let (place, function): (usize, Function) = match op {
        ReduceOp::Sum | ReduceOp::Avg => (0, reduce::<N, Plus>),
        ReduceOp::Min => (1, reduce::<N, Smaller>),
        ReduceOp::Max => (2, reduce::<N, Larger>),
        ReduceOp::Prod => (3, reduce::<N, Times>),
    };
    let handle = defined[place].get_or_init(|| {
        // SAFETY: a constant of the right type, which MPI overwrites.
        let mut handle = unsafe { RSMPI_SUM };
        // SAFETY: the function keeps MPI's contract for commutative operations.
        library.call("MPI_Op_create", || unsafe { MPI_Op_create(Some(function), 1, &raw mut handle) })?;
        Ok(Handle(handle))
    });
    handle.as_ref().map(|handle| handle.0).map_err(Clone::clone)
}

type Function = unsafe extern "C" fn(*mut c_void, *mut c_void, *mut c_int, *mut MPI_Datatype);

/// An operation on two numbers.
trait Binary {
    fn apply<A: Arithmetic>(a: A, b: A) -> A;
}

macro_rules! binary {
    ($($name:ident = $method:ident),*) => {$(
        struct $name;
        impl Binary for $name {
            #[inline(always)]
            fn apply<A: Arithmetic>(a: A, b: A) -> A {
                a.$method(b)
            }
        }
    )*};
}

binary!(Plus = plus, Smaller = smaller, Larger = larger, Times = times);

/// Reduces `count` numbers of `input` and `both` to `both`, as MPI calls it.
unsafe extern "C" fn reduce<N: Number, B: Binary>(
    input: *mut c_void,
    both: *mut c_void,
    count: *mut c_int,
    _: *mut MPI_Datatype,
) {
    // SAFETY: MPI passes the address of an integer.
    let count = usize::try_from(unsafe { *count }).unwrap_or_default();
    if count == 0 {
        return;
    }
    // SAFETY: MPI passes two buffers of that many elements of the datatype, which do not overlap and belong to this call.
    // They are aligned as its C type, which has the size and alignment of `N`.
    let (input, both) = unsafe {
        (std::slice::from_raw_parts(input.cast::<N>(), count), std::slice::from_raw_parts_mut(both.cast::<N>(), count))
    };
    combine::<N, B>(input, both);
}

fn combine<N: Number, B: Binary>(input: &[N], both: &mut [N]) {
    vectorise!(|| for (both, input) in both.iter_mut().zip(input) {
        *both = N::narrow(B::apply(input.widen(), both.widen()));
    });
}

/// Divides numbers of `dtype`, of which there are `count` from `address` on, by the number of ranks.
///
/// # Safety
/// The numbers must belong to the caller.
pub(crate) unsafe fn average(dtype: DType, address: *mut c_void, count: usize, ranks: usize) {
    fn divide<N: Number>(numbers: &mut [N], ranks: usize) {
        let factor = N::Wide::reciprocal(ranks);
        vectorise!(|| for number in numbers.iter_mut() {
            *number = N::narrow(number.widen().times(factor));
        });
    }
    if count == 0 {
        return;
    }
    macro_rules! numbers {
        ($kind:ty) => {
            // SAFETY: the caller's promise; a tensor's elements are aligned.
            divide::<$kind>(unsafe { std::slice::from_raw_parts_mut(address.cast(), count) }, ranks)
        };
    }
    match dtype {
        DType::F32 => numbers!(f32),
        DType::F64 => numbers!(f64),
        DType::F16 => numbers!(f16),
        DType::BF16 => numbers!(bf16),
        // The checks of calls let only floating-point numbers be averaged.
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_bit_numbers_are_reduced_in_f32_and_rounded() {
        let values = |values: &[f32]| values.iter().map(|value| bf16::from_f32(*value)).collect::<Vec<_>>();
        let mut both = values(&[1.0, -2.0, 256.0, f32::NAN]);
        combine::<bf16, Plus>(&values(&[2.0, 3.0, 1.0, 1.0]), &mut both);
        // 257 has no bf16, and is rounded to the even neighbour.
        assert_eq!(both[..3], values(&[3.0, 1.0, 256.0]));
        assert!(both[3].is_nan());
    }

    #[test]
    fn the_minimum_of_a_nan_is_nan_on_either_side() {
        let mut both = [1.0, f32::NAN, 3.0];
        combine::<f32, Smaller>(&[f32::NAN, 1.0, 2.0], &mut both);
        assert!(both[0].is_nan() && both[1].is_nan() && both[2] == 2.0, "{both:?}");
        let mut both = [1.0, f32::NAN, 3.0];
        combine::<f32, Larger>(&[f32::NAN, 1.0, 2.0], &mut both);
        assert!(both[0].is_nan() && both[1].is_nan() && both[2] == 3.0, "{both:?}");
    }

    #[test]
    fn an_average_divides_by_the_ranks() {
        let mut numbers = [3.0_f64, 6.0];
        // SAFETY: the numbers are this function's.
        unsafe { average(DType::F64, numbers.as_mut_ptr().cast(), 2, 3) };
        assert_eq!(numbers, [1.0, 2.0]);
    }
}
