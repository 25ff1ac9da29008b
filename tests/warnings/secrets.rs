//! The warnings of the process that hosts a store about clients with another secret.
use crate::logger::during;
use candle_ddp::rendezvous::{Error, Secret, TcpStore, TcpStoreOptions, TcpStoreServer, TcpStoreServerOptions};
use std::net::Ipv4Addr;
use std::time::Duration;

#[test]
fn the_host_hears_of_every_client_that_its_secret_keeps_out() {
    let secret = |digit: &str| Some(Secret::new(&digit.repeat(32)).unwrap());
    for (own, theirs, expected) in [
        (secret("1"), secret("2"), "it has another secret than this job"),
        (secret("1"), None, "it does not have the job's secret"),
        (None, secret("2"), "it has a secret, but this job has none"),
    ] {
        let options = TcpStoreServerOptions { secret: own, ..Default::default() };
        let server = TcpStoreServer::bind((Ipv4Addr::LOCALHOST, 0), options).unwrap();
        let options = TcpStoreOptions { timeout: Duration::from_secs(30), secret: theirs };
        let (refused, warnings) = during(|| {
            let refused = TcpStore::connect_with("127.0.0.1", server.port(), options);
            // The end of the server's thread.
            drop(server);
            refused
        });
        assert!(matches!(refused, Err(Error::Secret { .. })), "{expected}");
        assert!(warnings.len() == 1 && warnings[0].contains(expected), "{expected}: {warnings:?}");
    }
}
