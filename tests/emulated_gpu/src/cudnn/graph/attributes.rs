//! The attributes of descriptors: their types, how many elements they have, and whether they must be set.
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::ops::RangeInclusive;

/// A descriptor's kind, with cuDNN's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Pointwise = 0,
    Configuration = 3,
    Heuristics = 4,
    Plan = 5,
    PointwiseOperation = 13,
    Graph = 15,
    VariantPack = 16,
    Tensor = 17,
    Matmul = 18,
    MatmulOperation = 19,
    Reduction = 21,
    ReductionOperation = 22,
    ReshapeOperation = 31,
}

impl Kind {
    pub(super) fn new(number: c_int) -> Option<Self> {
        TABLE.iter().map(|(kind, ..)| *kind).chain([Self::Configuration]).find(|kind| *kind as c_int == number)
    }
}

/// Types of elements.
const HANDLE: c_int = 0;
pub(super) const DATA_TYPE: c_int = 1;
pub(super) const BOOLEAN: c_int = 2;
pub(super) const INT64: c_int = 3;
const POINTER: c_int = 6;
const HEURISTIC_MODE: c_int = 8;
const POINTWISE_MODE: c_int = 14;
pub(super) const DESCRIPTOR: c_int = 15;
const REDUCTION_OPERATOR: c_int = 18;

pub(super) const POINTWISE_KIND: c_int = 0;
pub(super) const POINTWISE_PRECISION: c_int = 1;
pub(super) const POINTWISE_AXIS: c_int = 9;
pub(super) const HEURISTICS_MODE: c_int = 200;
pub(super) const HEURISTICS_GRAPH: c_int = 201;
pub(super) const HEURISTICS_RESULTS: c_int = 202;
pub(super) const PLAN_HANDLE: c_int = 400;
pub(super) const PLAN_CONFIGURATION: c_int = 401;
pub(super) const PLAN_WORKSPACE: c_int = 402;
pub(super) const OPERATION_POINTWISE: c_int = 750;
pub(super) const POINTWISE_X: c_int = 751;
pub(super) const POINTWISE_B: c_int = 752;
pub(super) const POINTWISE_Y: c_int = 753;
pub(super) const POINTWISE_T: c_int = 758;
pub(super) const GRAPH_HANDLE: c_int = 800;
pub(super) const GRAPH_OPERATIONS: c_int = 801;
pub(super) const TENSOR_ALIGNMENT: c_int = 900;
pub(super) const TENSOR_DATA_TYPE: c_int = 901;
pub(super) const TENSOR_DIMENSIONS: c_int = 902;
pub(super) const TENSOR_STRIDES: c_int = 903;
pub(super) const TENSOR_ID: c_int = 906;
pub(super) const TENSOR_IS_VIRTUAL: c_int = 907;
pub(super) const TENSOR_IS_BY_VALUE: c_int = 908;
pub(super) const PACK_IDS: c_int = 1000;
pub(super) const PACK_POINTERS: c_int = 1001;
pub(super) const PACK_WORKSPACE: c_int = 1003;
pub(super) const MATMUL_PRECISION: c_int = 1500;
pub(super) const MATMUL_A: c_int = 1520;
pub(super) const MATMUL_B: c_int = 1521;
pub(super) const MATMUL_C: c_int = 1522;
pub(super) const OPERATION_MATMUL: c_int = 1523;
pub(super) const REDUCTION_KIND: c_int = 1600;
pub(super) const REDUCTION_PRECISION: c_int = 1601;
pub(super) const REDUCTION_X: c_int = 1610;
pub(super) const REDUCTION_Y: c_int = 1611;
pub(super) const OPERATION_REDUCTION: c_int = 1612;
pub(super) const RESHAPE_X: c_int = 2200;
pub(super) const RESHAPE_Y: c_int = 2201;
/// Not cuDNN's: how a candidate is told from the others.
pub(super) const CONFIGURATION_NUMBER: c_int = -1;
pub(super) const CONFIGURATION_GRAPH: c_int = -2;

/// What is known of an attribute.
pub(super) struct Attribute {
    pub(super) number: c_int,
    pub(super) element: c_int,
    pub(super) counts: RangeInclusive<i64>,
    /// The kinds of descriptors that it may name.
    pub(super) of: &'static [Kind],
    is_required: bool,
    pub(super) is_read_only: bool,
}

const fn required(number: c_int, element: c_int) -> Attribute {
    Attribute { number, element, counts: 1..=1, of: &[], is_required: true, is_read_only: false }
}

const fn optional(number: c_int, element: c_int) -> Attribute {
    Attribute { is_required: false, ..required(number, element) }
}

const fn list(number: c_int, element: c_int, most: i64) -> Attribute {
    Attribute { counts: 1..=most, ..required(number, element) }
}

const fn descriptor(number: c_int, of: &'static [Kind]) -> Attribute {
    Attribute { of, ..required(number, DESCRIPTOR) }
}

const fn result(number: c_int, element: c_int) -> Attribute {
    Attribute { is_read_only: true, ..optional(number, element) }
}

const TENSOR: &[Kind] = &[Kind::Tensor];
const OPERATIONS: &[Kind] =
    &[Kind::PointwiseOperation, Kind::MatmulOperation, Kind::ReductionOperation, Kind::ReshapeOperation];

static TABLE: &[(Kind, &[Attribute])] = &[
    (
        Kind::Tensor,
        &[
            required(TENSOR_ALIGNMENT, INT64),
            required(TENSOR_DATA_TYPE, DATA_TYPE),
            list(TENSOR_DIMENSIONS, INT64, 8),
            list(TENSOR_STRIDES, INT64, 8),
            required(TENSOR_ID, INT64),
            optional(TENSOR_IS_VIRTUAL, BOOLEAN),
            optional(TENSOR_IS_BY_VALUE, BOOLEAN),
        ],
    ),
    (
        Kind::Pointwise,
        &[
            required(POINTWISE_KIND, POINTWISE_MODE),
            required(POINTWISE_PRECISION, DATA_TYPE),
            optional(POINTWISE_AXIS, INT64),
        ],
    ),
    (
        Kind::PointwiseOperation,
        &[
            descriptor(OPERATION_POINTWISE, &[Kind::Pointwise]),
            descriptor(POINTWISE_X, TENSOR),
            Attribute { is_required: false, ..descriptor(POINTWISE_B, TENSOR) },
            descriptor(POINTWISE_Y, TENSOR),
            Attribute { is_required: false, ..descriptor(POINTWISE_T, TENSOR) },
        ],
    ),
    (Kind::Matmul, &[required(MATMUL_PRECISION, DATA_TYPE)]),
    (
        Kind::MatmulOperation,
        &[
            descriptor(OPERATION_MATMUL, &[Kind::Matmul]),
            descriptor(MATMUL_A, TENSOR),
            descriptor(MATMUL_B, TENSOR),
            descriptor(MATMUL_C, TENSOR),
        ],
    ),
    (Kind::Reduction, &[required(REDUCTION_KIND, REDUCTION_OPERATOR), required(REDUCTION_PRECISION, DATA_TYPE)]),
    (
        Kind::ReductionOperation,
        &[
            descriptor(OPERATION_REDUCTION, &[Kind::Reduction]),
            descriptor(REDUCTION_X, TENSOR),
            descriptor(REDUCTION_Y, TENSOR),
        ],
    ),
    (Kind::ReshapeOperation, &[descriptor(RESHAPE_X, TENSOR), descriptor(RESHAPE_Y, TENSOR)]),
    (
        Kind::Graph,
        &[required(GRAPH_HANDLE, HANDLE), Attribute { counts: 1..=64, ..descriptor(GRAPH_OPERATIONS, OPERATIONS) }],
    ),
    (
        Kind::Heuristics,
        &[
            required(HEURISTICS_MODE, HEURISTIC_MODE),
            descriptor(HEURISTICS_GRAPH, &[Kind::Graph]),
            result(HEURISTICS_RESULTS, DESCRIPTOR),
        ],
    ),
    (
        Kind::Plan,
        &[
            required(PLAN_HANDLE, HANDLE),
            descriptor(PLAN_CONFIGURATION, &[Kind::Configuration]),
            result(PLAN_WORKSPACE, INT64),
        ],
    ),
    (
        Kind::VariantPack,
        &[list(PACK_IDS, INT64, 64), list(PACK_POINTERS, POINTER, 64), optional(PACK_WORKSPACE, POINTER)],
    ),
];

/// A descriptor. Every element of an attribute is kept as a number; for descriptors, it is their address.
pub(super) struct Descriptor {
    pub(super) kind: Kind,
    pub(super) is_finalized: bool,
    pub(super) values: BTreeMap<c_int, Vec<i64>>,
}

impl Descriptor {
    pub(super) fn new(kind: Kind) -> Self {
        Self { kind, is_finalized: false, values: BTreeMap::new() }
    }

    /// The first attribute that must be set, but is not.
    pub(super) fn missing(&self) -> Option<c_int> {
        let required = attributes(self.kind).iter().filter(|attribute| attribute.is_required);
        required.map(|attribute| attribute.number).find(|number| !self.values.contains_key(number))
    }

    /// The element of an attribute that has one; 0 if it is not set.
    pub(super) fn one(&self, attribute: c_int) -> i64 {
        self.values.get(&attribute).map_or(0, |values| values[0])
    }

    /// The descriptor that an attribute names.
    ///
    /// # Safety
    /// It must exist.
    pub(super) unsafe fn named(&self, attribute: c_int) -> Option<&Self> {
        // SAFETY: guaranteed by the caller.
        unsafe { (self.one(attribute) as *const Self).as_ref() }
    }
}

fn attributes(kind: Kind) -> &'static [Attribute] {
    TABLE.iter().find(|(known, _)| *known == kind).map_or(&[], |(_, attributes)| attributes)
}

pub(super) fn find(kind: Kind, number: c_int) -> Option<&'static Attribute> {
    attributes(kind).iter().find(|attribute| attribute.number == number)
}

pub(super) fn name(kind: Kind, attribute: c_int) -> String {
    format!("attribute {attribute} of a {kind:?}")
}

/// # Safety
/// There must be as many elements of this type.
pub(super) unsafe fn read(element: c_int, count: usize, from: *const c_void) -> Vec<i64> {
    // SAFETY: guaranteed by the caller.
    let one = |index| unsafe {
        match element {
            BOOLEAN => from.cast::<u8>().add(index).read().into(),
            INT64 => from.cast::<i64>().add(index).read(),
            HANDLE | POINTER | DESCRIPTOR => from.cast::<usize>().add(index).read() as i64,
            _ => from.cast::<c_int>().add(index).read().into(),
        }
    };
    (0..count).map(one).collect()
}
