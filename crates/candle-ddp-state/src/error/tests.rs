use super::*;

#[test]
fn what_peers_say_cannot_drive_a_terminal() {
    let reason = "line\nä\u{1b}]0;title\u{7} \u{9b}31m\r\tend".to_string();
    let error = Error::from(Failure::PeerFailed { peer: 1, reason });
    let text = "rank 1 ended the group: line\nä\\u{1b}]0;title\\u{7} \\u{9b}31m\\r\tend";
    assert_eq!(error.to_string(), text);
    assert_eq!(format!("{error:?}"), format!("PeerFailed: {text}"));
}

#[test]
fn a_list_of_very_many_ranks_is_cut() {
    let connect = |peers| Error::Connect { rank: 0, peers, timeout: Duration::from_secs(1), reason: String::new() };
    assert!(connect(vec![1, 2]).to_string().starts_with("rank 0 has no connection to rank(s) [1, 2] (time-out 1s)"));
    assert_eq!(connect(vec![]).to_string(), "rank 0 has no connection to the others of its group (time-out 1s): ");
    let text = connect((1..256).collect()).to_string();
    assert!(text.contains("rank(s) [1, 2, 3,") && text.contains(", 20 and 235 more] (time-out"), "{text}");
    let (missing, timeout) = ((1..256).collect(), Duration::from_secs(1));
    let text = Error::MonitoredBarrier { rank: 0, missing, timeout }.to_string();
    assert!(text.contains(", 20 and 235 more] did not come"), "{text}");
}

#[test]
fn one_tensor_differs_and_several_differ() {
    let text = |names: &[&str]| {
        let names = names.iter().map(ToString::to_string).collect();
        Error::PartDiffers { part: "model".to_string(), ranks: vec![1, 2], names }.to_string()
    };
    assert!(text(&["w"]).contains(": w on ranks 1, 2 differs from other ranks'."), "{}", text(&["w"]));
    assert!(text(&["b", "w"]).contains(": b, w on ranks 1, 2 differ from other ranks'."), "{}", text(&["b", "w"]));
}

#[test]
fn logs_and_main_show_the_variant_and_the_text() {
    let error = Error::from(rendezvous::Error::MissingEnvironment {
        variable: "RANK",
        hint: "the launcher sets it".to_string(),
    });
    let text = "MissingEnvironment: the environment variable RANK is not set: the launcher sets it";
    assert_eq!(format!("{error:?}"), text);
    let error = Error::io("reading x", std::io::Error::other("no such disk"));
    assert_eq!(format!("{error:?}"), "Io: reading x: no such disk");
}

/// As `anyhow` and `eyre` print an error: its text, then that of each source.
#[test]
fn a_chain_of_sources_says_nothing_twice() {
    let refused = || std::io::Error::other("no such disk");
    let failure = Failure::PeerGone { rank: 0, peer: 1, call: "barrier()".to_string() };
    let ours = Error::io("reading x", refused());
    let through_candle = Error::Candle(candle_core::Error::from(Error::io("reading x", refused())));
    for error in [ours, through_candle, failure.into(), Error::from(candle_core::Error::Io(refused()))] {
        let mut texts = vec![error.to_string()];
        let mut next = std::error::Error::source(&error);
        while let Some(source) = next {
            texts.push(source.to_string());
            next = source.source();
        }
        for (index, text) in texts.iter().enumerate() {
            assert!(!texts[..index].iter().any(|before| before.contains(text)), "{texts:?}");
        }
    }
}

#[test]
fn errors_come_out_of_candles_as_they_went_in() {
    let through = |error: Error| Error::from(candle_core::Error::from(error));
    let error = through(Error::RankOutOfRange { rank: 3, world_size: 2 });
    assert!(matches!(error, Error::RankOutOfRange { rank: 3, world_size: 2 }), "{error}");
    let ours = Error::invalid("eps", "it is negative");
    let text = ours.to_string();
    assert_eq!(candle_core::Error::from(ours).to_string(), text);

    // candle's own stay candle's.
    let missing = std::io::Error::from(std::io::ErrorKind::NotFound);
    let text = missing.to_string();
    for error in [Error::from(candle_core::Error::Io(missing)), through(candle_core::Error::msg(&text).into())] {
        assert!(matches!(&error, Error::Candle(_)) && error.to_string().starts_with(&text), "{error}");
    }
}

#[test]
fn nobody_blames_itself() {
    let own = Error::from(Failure::PeerFailed { peer: 1, reason: "no disk".to_string() });
    assert_eq!(own.of_rank(1, Some).culprit, None);
    assert_eq!((own.of_rank(5, |peer| Some(peer + 2)).culprit, own.name()), (Some(3), "PeerFailed"));
    let non_finite = |rank| {
        Error::NonFinite { parameter: None, rank, value: "a NaN".to_string(), steps: 1 }.of_rank(1, Some).culprit
    };
    assert_eq!([Some(2), Some(1), None].map(non_finite), [Some(2), None, None]);
    let differ = |ranks| Error::ReplicasDiffer { ranks, names: Vec::new(), passes: 2 }.of_rank(1, Some).culprit;
    assert_eq!([vec![0], vec![1], vec![0, 1]].map(differ), [Some(0), None, None]);
    let unknown = Error::RankFailed { rank: 7, reason: "no disk".to_string() };
    assert_eq!(unknown.of_rank(1, |_| None).culprit, None);
}
