//! cuDNN's graph API, as far as attention needs it: descriptors with attributes, which become operations, a graph, candidates for
//! it, and a plan that executes it. Stricter than cuDNN: whatever an attribute's description below does not name is refused.
mod attributes;
mod evaluate;
mod program;
#[cfg(test)]
mod tests;

use super::{BAD_PARAM, EXECUTION_FAILED, Handle, NOT_SUPPORTED, SUCCESS, Status};
use crate::count::count;
use crate::memory::check;
use crate::object::{create, give};
use crate::stream::push;
use attributes::{DESCRIPTOR, Descriptor, INT64, Kind, find, name};
use program::{Program, plan_of};
use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering;

const BAD_PARAM_NULL_POINTER: Status = 2002;
const BAD_PARAM_MISALIGNED_POINTER: Status = 2003;
const BAD_PARAM_NOT_FINALIZED: Status = 2004;
const BAD_PARAM_OUT_OF_BOUND: Status = 2005;
const BAD_PARAM_SIZE_INSUFFICIENT: Status = 2006;
const BAD_PARAM_ATTRIBUTE_TYPE: Status = 2010;
const NOT_SUPPORTED_SHARED_MEMORY_INSUFFICIENT: Status = 3010;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnBackendCreateDescriptor(kind: c_int, descriptor: *mut *mut c_void) -> Status {
    let Some(kind) = Kind::new(kind) else { return NOT_SUPPORTED };
    // SAFETY: guaranteed by the caller.
    unsafe { create(descriptor, Descriptor::new(kind)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnBackendDestroyDescriptor(descriptor: *mut c_void) -> Status {
    if descriptor.is_null() {
        return BAD_PARAM_NULL_POINTER;
    }
    // SAFETY: the descriptor came from `cudnnBackendCreateDescriptor`.
    drop(unsafe { Box::from_raw(descriptor.cast::<Descriptor>()) });
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnBackendSetAttribute(
    descriptor: *mut c_void,
    attribute: c_int,
    kind: c_int,
    count: i64,
    elements: *const c_void,
) -> Status {
    if descriptor.is_null() || elements.is_null() {
        return BAD_PARAM_NULL_POINTER;
    }
    // SAFETY: the descriptor came from `cudnnBackendCreateDescriptor`.
    let this = unsafe { &mut *descriptor.cast::<Descriptor>() };
    let Some(expected) = find(this.kind, attribute).filter(|expected| !expected.is_read_only) else {
        eprintln!("emulated cuDNN: a {:?} has no attribute {attribute} that can be set", this.kind);
        return BAD_PARAM;
    };
    if this.is_finalized {
        return NOT_SUPPORTED;
    }
    if expected.element != kind {
        eprintln!(
            "emulated cuDNN: {} has elements of type {}, not {kind}",
            name(this.kind, attribute),
            expected.element
        );
        return BAD_PARAM_ATTRIBUTE_TYPE;
    }
    if !expected.counts.contains(&count) {
        return BAD_PARAM_OUT_OF_BOUND;
    }
    // SAFETY: guaranteed by the caller.
    let values = unsafe { attributes::read(kind, count as usize, elements) };
    if kind == DESCRIPTOR {
        for value in &values {
            let other = *value as *const Descriptor;
            // SAFETY: descriptors came from `cudnnBackendCreateDescriptor`.
            match unsafe { other.as_ref() } {
                None => return BAD_PARAM_NULL_POINTER,
                Some(other) if !other.is_finalized => return BAD_PARAM_NOT_FINALIZED,
                Some(other) if !expected.of.contains(&other.kind) => return BAD_PARAM,
                Some(_) => {}
            }
        }
    }
    this.values.insert(attribute, values);
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnBackendFinalize(descriptor: *mut c_void) -> Status {
    if descriptor.is_null() {
        return BAD_PARAM_NULL_POINTER;
    }
    // SAFETY: the descriptor came from `cudnnBackendCreateDescriptor`.
    let this = unsafe { &mut *descriptor.cast::<Descriptor>() };
    if this.is_finalized {
        return BAD_PARAM;
    }
    if let Some(missing) = this.missing() {
        eprintln!("emulated cuDNN: {} is not set", name(this.kind, missing));
        return BAD_PARAM;
    }
    // SAFETY: the descriptors that it names exist, as the program guarantees to cuDNN.
    let status = unsafe { program::verify(this) };
    if matches!(this.kind, Kind::Plan) {
        crate::module::await_gpu();
    }
    this.is_finalized = status == SUCCESS;
    status
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnBackendGetAttribute(
    descriptor: *mut c_void,
    attribute: c_int,
    kind: c_int,
    requested: i64,
    returned: *mut i64,
    elements: *mut c_void,
) -> Status {
    // SAFETY: the descriptor came from `cudnnBackendCreateDescriptor`.
    let Some(this) = (unsafe { descriptor.cast::<Descriptor>().as_ref() }) else { return BAD_PARAM_NULL_POINTER };
    if !this.is_finalized {
        return BAD_PARAM_NOT_FINALIZED;
    }
    match (this.kind, attribute) {
        (Kind::Heuristics, attributes::HEURISTICS_RESULTS) if kind == DESCRIPTOR => {
            // SAFETY: the graph exists, as the program guarantees to cuDNN.
            let candidates = unsafe { program::candidates(this) };
            let count = match elements.is_null() {
                true => candidates.len(),
                false => candidates.len().min(requested.max(0) as usize),
            };
            for (index, candidate) in candidates.into_iter().take(count).enumerate() {
                if elements.is_null() {
                    break;
                }
                // SAFETY: guaranteed by the caller.
                let Some(to) = (unsafe { (*elements.cast::<*mut Descriptor>().add(index)).as_mut() }) else {
                    return BAD_PARAM_NULL_POINTER;
                };
                if to.kind != Kind::Configuration {
                    return BAD_PARAM;
                }
                *to = candidate;
            }
            // SAFETY: guaranteed by the caller.
            unsafe { give(returned, count as i64) }
        }
        (Kind::Plan, attributes::PLAN_WORKSPACE) if kind == INT64 => {
            if requested < 1 || elements.is_null() {
                return BAD_PARAM_SIZE_INSUFFICIENT;
            }
            // SAFETY: guaranteed by the caller, and the descriptors of the plan exist.
            unsafe {
                *elements.cast::<i64>() = plan_of(this).workspace as i64;
                *returned = 1;
            }
            SUCCESS
        }
        _ => {
            eprintln!("emulated cuDNN: {} cannot be read as type {kind}", name(this.kind, attribute));
            NOT_SUPPORTED
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudnnBackendExecute(
    handle: *mut c_void,
    plan: *mut c_void,
    variant_pack: *mut c_void,
) -> Status {
    // SAFETY: the descriptors came from `cudnnBackendCreateDescriptor`.
    let (plan, pack) = unsafe { (plan.cast::<Descriptor>().as_ref(), variant_pack.cast::<Descriptor>().as_ref()) };
    let (Some(plan), Some(pack)) = (plan, pack) else { return BAD_PARAM_NULL_POINTER };
    if !plan.is_finalized || !pack.is_finalized {
        return BAD_PARAM_NOT_FINALIZED;
    }
    if plan.kind != Kind::Plan || pack.kind != Kind::VariantPack || plan.one(attributes::PLAN_HANDLE) != handle as i64 {
        return BAD_PARAM;
    }
    let (ids, addresses) = (&pack.values[&attributes::PACK_IDS], &pack.values[&attributes::PACK_POINTERS]);
    // SAFETY: the descriptors of the plan exist, and scalars are on the host, as the program guarantees to cuDNN.
    let (program, needed) = unsafe {
        let found = plan_of(plan);
        match Program::new(found.graph, ids.iter().copied().zip(addresses.iter().copied()).collect()) {
            Ok(program) => (program, found.workspace),
            Err(status) => return status,
        }
    };
    let workspace = pack.values.get(&attributes::PACK_WORKSPACE).map_or(0, |values| values[0] as u64);
    if needed > 0 && workspace == 0 {
        return BAD_PARAM_NULL_POINTER;
    }
    // cuDNN's kernels load 16 bytes at once; a GPU reports this only when the kernel has failed.
    if needed > 0 && !workspace.is_multiple_of(16) {
        return EXECUTION_FAILED;
    }
    // SAFETY: the handle came from `cudnnCreate`.
    let stream = unsafe { &*handle.cast::<Handle>() }.0.load(Ordering::Relaxed);
    count(program.name(), 1);
    let pushed = push(stream as *mut c_void, move || {
        check(workspace, needed, "the workspace of a graph");
        program.check();
        // SAFETY: all of it is allocated; the program guarantees to cuDNN that nothing else uses it.
        unsafe {
            (workspace as *mut u8).write_bytes(0xFF, needed);
            program.run();
        }
    });
    if pushed == 0 { SUCCESS } else { EXECUTION_FAILED }
}
