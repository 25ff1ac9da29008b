//! The recipe in docs/ranks_that_differ.md for batches that one rank cannot use.
use crate::common::bad_batches::bad_batches;
use crate::common::ranks;

#[test]
fn what_one_rank_cannot_use_is_skipped_on_all_ranks() {
    for world_size in [2, 3] {
        ranks(world_size, |pg| bad_batches(&pg));
    }
}

#[test]
fn the_page_shows_this_recipe() {
    assert!(include_str!("../../docs/ranks_that_differ.md").contains(include_str!("bad_batches_recipe.rs")));
}
