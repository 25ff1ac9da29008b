//! The operations: what is true of each of them on any data path.

/// The number of elements that an operand has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// There is no such operand.
    None,
    /// As many elements as the call counts.
    One,
    /// As many elements for each rank.
    All,
    /// The same on the root; the other ranks have no such operand.
    AllOnRoot,
}

impl Extent {
    /// The operand's size, where `one` is the size of what the call counts.
    pub(crate) fn of(self, one: usize, world_size: usize, is_root: bool) -> Option<usize> {
        match self {
            Self::One => Some(one),
            Self::All => Some(one.saturating_mul(world_size)),
            Self::AllOnRoot if is_root => Some(one.saturating_mul(world_size)),
            Self::None | Self::AllOnRoot => None,
        }
    }
}

/// Between which ranks data moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flow {
    /// Data moves from every rank to every other.
    Everywhere,
    FromRoot,
    ToRoot,
    /// Data moves to the peer of the call's channel.
    ToPeer,
    FromPeer,
}

macro_rules! operations {
    ($($(#[$doc:meta])* $operation:ident = $name:ident, $output:ident from $input:ident, $flow:ident;)+) => {
        /// The kinds of calls. Their discriminants are sent to other ranks.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Operation {
            $($(#[$doc])* $operation,)+
        }

        impl Operation {
            /// All operations, in the order of their numbers.
            pub(crate) const ALL: &[Self] = &[$(Self::$operation),+];

            /// The name of the method that users call.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$operation => stringify!($name),)+
                }
            }

            /// The extents of the output and of the input.
            #[doc(hidden)]
            #[inline]
            pub fn extents(self) -> [Extent; 2] {
                match self {
                    $(Self::$operation => [Extent::$output, Extent::$input],)+
                }
            }

            pub(crate) fn flow(self) -> Flow {
                match self {
                    $(Self::$operation => Flow::$flow,)+
                }
            }
        }
    };
}

operations! {
    /// The barrier at the end of a group's construction.
    Connect = connect, None from None, Everywhere;
    /// Every rank's output becomes the reduction of all.
    AllReduce = all_reduce, One from None, Everywhere;
    /// Every rank's output becomes a copy of the root's.
    Broadcast = broadcast, One from None, FromRoot;
    /// The output of the root becomes the reduction of all; the other ranks' outputs do not change.
    Reduce = reduce, One from None, ToRoot;
    /// The output becomes all ranks' inputs in rank order; the input may be this rank's place in it.
    AllGather = all_gather, All from One, Everywhere;
    /// The output becomes this rank's part of the reduction of all inputs.
    ReduceScatter = reduce_scatter, One from All, Everywhere;
    /// Part `p` of the input goes to rank `p`; part `p` of the output comes from rank `p`. The output may lack this rank's
    /// own part.
    AllToAll = all_to_all, One from One, Everywhere;
    /// The output of the root becomes all ranks' inputs in rank order.
    Gather = gather, AllOnRoot from One, ToRoot;
    /// The output becomes this rank's part of the root's input.
    Scatter = scatter, One from AllOnRoot, FromRoot;
    /// The input goes to one rank.
    Send = send, None from One, ToPeer;
    /// The output becomes what one rank sends.
    Recv = recv, One from None, FromPeer;
    /// Every rank waits until all have made the call.
    Barrier = barrier, None from None, Everywhere;
}

impl Operation {
    /// Whether the call changes the output on this rank, which is the root or is not.
    #[doc(hidden)]
    pub fn changes_output(self, is_root: bool) -> bool {
        match (self.extents(), self.flow()) {
            // With one operand, some ranks only read it.
            ([Extent::One, Extent::None], Flow::FromRoot) => !is_root,
            ([Extent::One, Extent::None], Flow::ToRoot) => is_root,
            ([Extent::None, _], _) => false,
            _ => true,
        }
    }

    /// Whether every rank has a part in the call, and the parts are one result.
    pub(crate) fn is_common(self) -> bool {
        self.flow() == Flow::Everywhere && self.extents() != [Extent::None; 2]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_rank_changes_depends_on_the_root() {
        let changes = |operation: Operation| [true, false].map(|is_root| operation.changes_output(is_root));
        assert_eq!(changes(Operation::Broadcast), [false, true]);
        assert_eq!(changes(Operation::Reduce), [true, false]);
        assert_eq!(changes(Operation::Send), [false; 2]);
        for operation in [Operation::AllReduce, Operation::AllGather, Operation::Scatter, Operation::Recv] {
            assert_eq!(changes(operation), [true; 2], "{operation:?}");
        }
        let common: Vec<_> =
            Operation::ALL.iter().filter(|operation| operation.is_common()).map(|operation| operation.name()).collect();
        assert_eq!(common, ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]);
    }
}
