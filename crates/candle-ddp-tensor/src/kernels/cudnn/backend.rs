//! cuDNN's graph API: descriptors, which are described by attributes, finalized, and then used.
use super::ffi::{self, Status};
use crate::{Error, Result};
use cudarc::cudnn::sys::{
    self, cudnnBackendAttributeName_t as Name, cudnnBackendAttributeType_t as Type, cudnnBackendDescriptor_t,
    cudnnBackendDescriptorType_t as Kind, cudnnDataType_t, cudnnHandle_t, cudnnPointwiseMode_t,
};
use std::ffi::c_void;

/// cuDNN's answer.
#[derive(Debug)]
pub(super) enum Failure {
    /// It has nothing for this.
    NotSupported(Status),
    Other(Error),
}

impl Failure {
    /// Nothing, where cuDNN has nothing; other failures are errors.
    pub(super) fn or_nothing<T>(result: std::result::Result<T, Self>) -> Result<Option<T>> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(Self::NotSupported(status)) => {
                log::debug!("cuDNN has nothing for a graph: {status}");
                Ok(None)
            }
            Err(Self::Other(error)) => Err(error),
        }
    }
}

fn check(status: Status, operation: impl FnOnce() -> String) -> std::result::Result<(), Failure> {
    status.result().map_err(|error| match status.is_not_supported() {
        true => Failure::NotSupported(error),
        false => Failure::Other(super::descriptor::failure(operation(), error)),
    })
}

/// The elements of an attribute.
#[derive(Clone, Copy, Debug)]
pub(super) enum Value<'a> {
    Handle(cudnnHandle_t),
    DataType(cudnnDataType_t),
    Flag(bool),
    Integers(&'a [i64]),
    Pointers(&'a [*mut c_void]),
    Pointwise(cudnnPointwiseMode_t),
    Reduction(sys::cudnnReduceTensorOp_t),
    Heuristics(sys::cudnnBackendHeurMode_t),
    Knob(u32),
    Descriptors(&'a [&'a Descriptor]),
    #[cfg(test)]
    Text(&'a [u8]),
}

/// A descriptor, which is finalized.
#[derive(Debug)]
pub(super) struct Descriptor(cudnnBackendDescriptor_t);

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: the descriptor was created, and is destroyed only here. Nobody is left to handle an error.
        let _ = unsafe { ffi::cudnnBackendDestroyDescriptor(self.0) };
    }
}

impl Descriptor {
    /// Describes and finalizes. What the attributes name must live as long as this: cuDNN may keep no more than its address.
    pub(super) fn new(kind: Kind, attributes: &[(Name, Value)]) -> std::result::Result<Self, Failure> {
        let this = Self::create(kind)?;
        for (name, value) in attributes {
            this.set(*name, value)?;
        }
        // SAFETY: the descriptor was just created.
        check(unsafe { ffi::cudnnBackendFinalize(this.0) }, || format!("finalizing a {kind:?}"))?;
        Ok(this)
    }

    fn create(kind: Kind) -> std::result::Result<Self, Failure> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: there is room for the descriptor.
        check(unsafe { ffi::cudnnBackendCreateDescriptor(kind, &raw mut raw) }, || format!("creating a {kind:?}"))?;
        Ok(Self(raw))
    }

    fn set(&self, name: Name, value: &Value) -> std::result::Result<(), Failure> {
        let descriptors: Vec<_>;
        let (kind, count, elements): (_, _, *const c_void) = match value {
            Value::Handle(handle) => (Type::CUDNN_TYPE_HANDLE, 1, std::ptr::from_ref(handle).cast()),
            Value::DataType(dtype) => (Type::CUDNN_TYPE_DATA_TYPE, 1, std::ptr::from_ref(dtype).cast()),
            Value::Flag(flag) => (Type::CUDNN_TYPE_BOOLEAN, 1, std::ptr::from_ref(flag).cast()),
            Value::Integers(integers) => (Type::CUDNN_TYPE_INT64, integers.len(), integers.as_ptr().cast()),
            Value::Pointers(pointers) => (Type::CUDNN_TYPE_VOID_PTR, pointers.len(), pointers.as_ptr().cast()),
            Value::Pointwise(mode) => (Type::CUDNN_TYPE_POINTWISE_MODE, 1, std::ptr::from_ref(mode).cast()),
            Value::Reduction(kind) => (Type::CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, std::ptr::from_ref(kind).cast()),
            Value::Heuristics(mode) => (Type::CUDNN_TYPE_HEUR_MODE, 1, std::ptr::from_ref(mode).cast()),
            Value::Knob(knob) => (Type::CUDNN_TYPE_KNOB_TYPE, 1, std::ptr::from_ref(knob).cast()),
            Value::Descriptors(of) => {
                descriptors = of.iter().map(|descriptor| descriptor.0).collect();
                (Type::CUDNN_TYPE_BACKEND_DESCRIPTOR, descriptors.len(), descriptors.as_ptr().cast())
            }
            #[cfg(test)]
            Value::Text(text) => (Type::CUDNN_TYPE_CHAR, text.len(), text.as_ptr().cast()),
        };
        // SAFETY: there are as many elements of the type, which cuDNN copies.
        let status = unsafe { ffi::cudnnBackendSetAttribute(self.0, name, kind, count as i64, elements) };
        check(status, || format!("setting {name:?}"))
    }

    /// The candidates for a graph, best first.
    pub(super) fn candidates(&self) -> std::result::Result<Vec<Self>, Failure> {
        let (name, kind) = (Name::CUDNN_ATTR_ENGINEHEUR_RESULTS, Type::CUDNN_TYPE_BACKEND_DESCRIPTOR);
        let mut count = 0;
        // SAFETY: null stands for the question of how many there are.
        let status =
            unsafe { ffi::cudnnBackendGetAttribute(self.0, name, kind, 0, &raw mut count, std::ptr::null_mut()) };
        check(status, || "counting candidates".to_string())?;
        let new = |_| Self::create(Kind::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
        let mut candidates = (0..count).map(new).collect::<std::result::Result<Vec<_>, _>>()?;
        let mut raw: Vec<_> = candidates.iter().map(|candidate| candidate.0).collect();
        let asked = count;
        // SAFETY: there are as many descriptors as are asked for, which cuDNN fills.
        let status = unsafe {
            ffi::cudnnBackendGetAttribute(self.0, name, kind, asked, &raw mut count, raw.as_mut_ptr().cast())
        };
        check(status, || "reading candidates".to_string())?;
        candidates.truncate(usize::try_from(count).unwrap_or(0));
        Ok(candidates)
    }

    /// The size of a plan's workspace in bytes.
    pub(super) fn workspace(&self) -> std::result::Result<usize, Failure> {
        let (mut bytes, mut count) = (0i64, 0);
        let (name, kind) = (Name::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, Type::CUDNN_TYPE_INT64);
        // SAFETY: there is room for one number.
        let status =
            unsafe { ffi::cudnnBackendGetAttribute(self.0, name, kind, 1, &raw mut count, (&raw mut bytes).cast()) };
        check(status, || "reading the size of a workspace".to_string())?;
        // No plan needs as much as a size that does not fit.
        Ok(usize::try_from(bytes).unwrap_or(usize::MAX))
    }

    /// Enqueues this plan on the handle's stream. Does not wait.
    ///
    /// # Safety
    /// The handle must exist. The tensors must be as the plan's graph describes them, and live as `Address` demands; the workspace
    /// must be as large as the plan asks for.
    pub(super) unsafe fn execute(&self, handle: cudnnHandle_t, pack: &Self) -> std::result::Result<(), Failure> {
        // SAFETY: the descriptors exist; the rest is guaranteed by the caller.
        check(unsafe { ffi::cudnnBackendExecute(handle, self.0, pack.0) }, || "executing a graph".to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cudnn_does_not_support_is_no_error() {
        let answer = |status| Failure::or_nothing(check(status, || "finalizing a graph".to_string()));
        assert!(answer(Status::SUCCESS).unwrap().is_some());
        // A shape is not supported, and a reason of a newer version.
        for status in [Status::NOT_SUPPORTED, Status(3002), Status(3777)] {
            assert!(answer(status).unwrap().is_none(), "{status}");
        }
        // Shapes do not match, an internal error, and one of a newer version.
        for status in [Status(2008), Status(4000), Status(4777)] {
            let error = answer(status).unwrap_err().to_string();
            assert!(error.contains("finalizing a graph") && error.contains(&status.0.to_string()), "{error}");
        }
    }
}
