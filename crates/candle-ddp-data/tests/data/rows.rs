//! Rows of several samples: full, the same on any number of ranks, and runs that resume in them.
use crate::ranks::{alone, spawn};
use candle_ddp_data::{DataLoader, LengthBatches, LoaderOptions, LoaderState, pack};
use candle_ddp_state::{Error, Result};

/// Lengths from 3 to 300, most of them short.
fn lengths() -> Vec<usize> {
    (0..2000u64).map(|i| 3 + (i * i * 7919 % 1009 * (i * 31 % 97) / 330) as usize).collect()
}

type Rows = Vec<Vec<usize>>;

/// The rows of each of the ranks in epoch 1, at most `count` on each, and the state after them.
fn read(order: &LengthBatches, ranks: usize, from: Option<LoaderState>, count: usize) -> (Vec<Rows>, LoaderState) {
    let read = spawn(ranks, |group| {
        let options = LoaderOptions { num_workers: ranks - 1, ..Default::default() };
        let mut loader: DataLoader<_, Vec<usize>> = DataLoader::with_order(0..2000, order.clone(), group, options, Ok)?;
        if let Some(state) = from {
            loader.resume(state)?;
        }
        Ok((loader.epoch(1).take(count).collect::<Result<Rows>>()?, loader.state()))
    });
    let (rows, states): (Vec<_>, Vec<_>) = read.unwrap().into_iter().unzip();
    assert!(states.iter().all(|state| *state == states[0]), "{states:?}");
    (rows, states[0])
}

#[test]
fn rows_are_full_and_the_same_on_any_number_of_ranks() {
    let (lengths, most) = (lengths(), 500);
    let tokens = |row: &[usize]| row.iter().map(|index| lengths[*index]).sum::<usize>();
    let all: usize = lengths.iter().sum();
    for (window, free) in [(1, 0.3), (8, 0.01), (1000, 0.01)] {
        let order = LengthBatches::packed(lengths.iter().copied(), most, window).unwrap();
        let (mut rows, _) = read(&order, 1, None, usize::MAX);
        let rows = rows.remove(0);
        assert!(rows.iter().all(|row| tokens(row) <= most));
        let room = (rows.len() - 1) * most;
        assert!(room as f64 * (1. - free) < all as f64, "{} rows for {all} tokens, window {window}", rows.len());
        let mut samples = rows.concat();
        samples.sort_unstable();
        assert!(samples.into_iter().eq(0..2000), "each sample is in one row");
        for ranks in [2, 3] {
            let (of_ranks, _) = read(&order, ranks, None, usize::MAX);
            for (place, row) in rows.iter().enumerate() {
                assert_eq!(of_ranks[place % ranks][place / ranks], *row, "window {window}, {ranks} ranks");
            }
        }
        let loader = DataLoader::with_order(0..2000, order, &alone(), LoaderOptions::default(), Ok).unwrap();
        let next: Rows = loader.epoch(2).collect::<Result<_>>().unwrap();
        let same = rows.iter().filter(|row| next.contains(row)).count();
        assert!(same < rows.len() / 10, "{same} of {} rows are in both epochs", rows.len());
    }
}

#[test]
fn runs_resume_in_the_middle_of_an_epoch_of_rows() {
    let order = LengthBatches::packed(lengths(), 500, 8).unwrap();
    let rows = read(&order, 1, None, usize::MAX).0.remove(0);
    for (before, after) in [(1, 3), (2, 3), (3, 2), (2, 1)] {
        let (first, state) = read(&order, before, None, 5);
        assert_eq!(state.consumed, rows[..5 * before].concat().len());
        let (rest, _) = read(&order, after, Some(state), usize::MAX);
        for (place, row) in rows.iter().enumerate() {
            let resumed = match place.checked_sub(5 * before) {
                Some(place) => &rest[place % after][place / after],
                None => &first[place % before][place / before],
            };
            assert_eq!(resumed, row, "row {place}, {before} → {after} ranks");
        }
    }
}

#[test]
fn samples_that_fit_into_no_row_are_refused() {
    let refused = |lengths: &[usize], window, name: &str, text: &str| match LengthBatches::packed(
        lengths.iter().copied(),
        10,
        window,
    ) {
        Err(Error::InvalidArgument { argument, reason }) => {
            assert!(argument == name && reason.contains(text), "{argument}: {reason}");
        }
        other => panic!("{name}: {other:?}"),
    };
    refused(&[3, 11], 2, "lengths", "sample 1 is 11");
    refused(&[0, 1], 2, "lengths", "sample 0 is 0");
    refused(&[], 2, "lengths", "at least one");
    refused(&[1], 0, "window", "at least 1");
}

/// The rows of a loader that packs have the tokens of the documents, one after the other.
#[test]
fn a_loader_packs_rows() {
    let documents: Vec<Vec<u32>> = lengths().iter().map(|length| (0..*length as u32).collect()).collect();
    let order = LengthBatches::packed(lengths(), 500, 8).unwrap();
    let rows = read(&order, 1, None, usize::MAX).0.remove(0);
    let find = {
        let documents = documents.clone();
        move |row: Vec<usize>| pack(row.into_iter().map(|index| &documents[index]))
    };
    let loader = DataLoader::with_order(0..2000, order, &alone(), LoaderOptions::default(), find).unwrap();
    for (row, packed) in rows.iter().zip(loader.epoch(1)) {
        let (packed, tokens) = (packed.unwrap(), row.iter().flat_map(|index| documents[*index].clone()));
        let tokens: Vec<u32> = tokens.collect();
        assert_eq!(packed.tokens.to_vec2::<u32>().unwrap(), std::slice::from_ref(&tokens));
        // Each token of these documents is its position.
        assert_eq!(packed.positions.to_vec1::<u32>().unwrap(), tokens);
    }
}
