//! What the emulated cuDNN refuses, so that a program's mistakes show.
use super::attributes::*;
use super::*;

/// Adds attributes of one type of element to a descriptor, until one is refused.
fn set<T>(descriptor: *mut c_void, element: c_int, attributes: &[(c_int, &[T])]) -> Status {
    let set = |(attribute, values): &(c_int, &[T])| {
        // SAFETY: the descriptor exists, and there are as many elements.
        unsafe {
            cudnnBackendSetAttribute(descriptor, *attribute, element, values.len() as i64, values.as_ptr().cast())
        }
    };
    attributes.iter().map(set).find(|status| *status != SUCCESS).unwrap_or(SUCCESS)
}

fn new(kind: Kind) -> *mut c_void {
    let mut descriptor = std::ptr::null_mut();
    // SAFETY: there is room for the descriptor.
    assert_eq!(unsafe { cudnnBackendCreateDescriptor(kind as c_int, &raw mut descriptor) }, SUCCESS);
    descriptor
}

fn finalize(descriptor: *mut c_void) -> Status {
    // SAFETY: the descriptor exists.
    unsafe { cudnnBackendFinalize(descriptor) }
}

/// A virtual tensor in bf16 that is not finalized.
fn tensor(id: i64, sizes: [i64; 4]) -> *mut c_void {
    let tensor = new(Kind::Tensor);
    let strides = [sizes[1] * sizes[2] * sizes[3], sizes[2] * sizes[3], sizes[3], 1];
    let numbers: [(c_int, &[i64]); 4] =
        [(TENSOR_ALIGNMENT, &[16]), (TENSOR_ID, &[id]), (TENSOR_DIMENSIONS, &sizes), (TENSOR_STRIDES, &strides)];
    assert_eq!(set(tensor, INT64, &numbers), SUCCESS);
    assert_eq!(set(tensor, BOOLEAN, &[(TENSOR_IS_VIRTUAL, &[1u8])]), SUCCESS);
    assert_eq!(set(tensor, DATA_TYPE, &[(TENSOR_DATA_TYPE, &[9 as c_int])]), SUCCESS);
    tensor
}

fn finalized(descriptor: *mut c_void) -> *mut c_void {
    assert_eq!(finalize(descriptor), SUCCESS);
    descriptor
}

#[test]
fn attributes_must_be_known_and_of_their_type_and_count() {
    let tensor = new(Kind::Tensor);
    assert_eq!(set(tensor, INT64, &[(POINTWISE_AXIS, &[1i64])]), BAD_PARAM);
    assert_eq!(set(tensor, DATA_TYPE, &[(TENSOR_ID, &[1 as c_int])]), BAD_PARAM_ATTRIBUTE_TYPE);
    assert_eq!(set(tensor, INT64, &[(TENSOR_ID, &[1i64, 2])]), BAD_PARAM_OUT_OF_BOUND);
    assert_eq!(finalize(tensor), BAD_PARAM, "nothing is set");
    assert_eq!(set(new(Kind::Plan), INT64, &[(PLAN_WORKSPACE, &[1i64])]), BAD_PARAM, "it can only be read");
}

#[test]
fn tensors_have_numbers_that_are_not_negative() {
    assert_eq!(finalize(tensor(-1, [1, 2, 3, 8])), BAD_PARAM);
    let good = finalized(tensor(1, [1, 2, 3, 8]));
    assert_eq!(finalize(good), BAD_PARAM, "twice");
    assert_eq!(set(good, INT64, &[(TENSOR_ID, &[2i64])]), NOT_SUPPORTED, "after its end");
}

#[test]
fn operations_need_finalized_tensors_that_fit() {
    let product = |sizes: [[i64; 4]; 3]| {
        let of = new(Kind::Matmul);
        assert_eq!(set(of, DATA_TYPE, &[(MATMUL_PRECISION, &[0 as c_int])]), SUCCESS);
        let operation = new(Kind::MatmulOperation);
        let [a, b, c] = [1, 2, 3].map(|id| finalized(tensor(id, sizes[id as usize - 1])));
        let tensors: [(c_int, &[*mut c_void]); 4] =
            [(MATMUL_A, &[a]), (MATMUL_B, &[b]), (MATMUL_C, &[c]), (OPERATION_MATMUL, &[finalized(of)])];
        assert_eq!(set(operation, DESCRIPTOR, &tensors), SUCCESS);
        finalize(operation)
    };
    assert_eq!(product([[1, 4, 3, 8], [1, 2, 8, 5], [1, 4, 3, 5]]), SUCCESS, "two heads share one");
    for c in [[1, 4, 3, 6], [1, 3, 3, 5], [2, 4, 3, 5]] {
        assert_eq!(product([[1, 4, 3, 8], [1, 2, 8, 5], c]), BAD_PARAM, "{c:?}");
    }
    let operation = new(Kind::MatmulOperation);
    let unfinished = tensor(1, [1; 4]);
    assert_eq!(set(operation, DESCRIPTOR, &[(MATMUL_A, &[unfinished])]), BAD_PARAM_NOT_FINALIZED);
    let of = new(Kind::Matmul);
    assert_eq!(set(of, DATA_TYPE, &[(MATMUL_PRECISION, &[0 as c_int])]), SUCCESS);
    assert_eq!(set(operation, DESCRIPTOR, &[(MATMUL_A, &[finalized(of)])]), BAD_PARAM, "of another kind");
}
