//! Ports for servers.
use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};

/// Returns a port outside the ephemeral range, so that no other process takes it in the meantime.
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let offset = std::process::id() * 31 + NEXT.fetch_add(1, Ordering::Relaxed);
        let port = 20_000 + (offset % 10_000) as u16;
        if TcpListener::bind(("0.0.0.0", port)).is_ok() {
            return port;
        }
    }
}
