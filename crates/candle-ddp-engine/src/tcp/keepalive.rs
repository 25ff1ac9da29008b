//! Detects hosts that vanish without closing their connections.
use std::net::TcpStream;
use std::time::Duration;

/// Makes the system probe an idle connection, and close it after `lost_after` without an answer.
pub(crate) fn keep_alive(socket: &TcpStream, lost_after: Duration) {
    use rustix::net::sockopt;
    let (idle, interval, count) = probes(lost_after);
    let set = || {
        sockopt::set_socket_keepalive(socket, true)?;
        sockopt::set_tcp_keepidle(socket, Duration::from_secs(idle))?;
        sockopt::set_tcp_keepintvl(socket, Duration::from_secs(interval))?;
        sockopt::set_tcp_keepcnt(socket, count)
    };
    if let Err(error) = set() {
        log::debug!("no TCP keepalive: {error}");
    }
}

/// The seconds before the first probe, the seconds between probes, and the number of unanswered probes: together
/// `lost_after`, rounded up.
fn probes(lost_after: Duration) -> (u64, u64, u32) {
    const LEAST: u64 = 2;
    /// Systems' limits for an interval and for the number of probes.
    const LONGEST: u64 = 32_767;
    const MOST: u64 = 127;
    let total = lost_after.as_secs().saturating_add(u64::from(lost_after.subsec_nanos() > 0));
    let total = total.clamp(LEAST, LONGEST * 100);
    let idle = (total / 4).clamp(1, 15);
    let left = total - idle;
    let interval = (left / 100).max((total / 10).clamp(1, 5)).min(LONGEST);
    (idle, interval, left.div_ceil(interval).min(MOST) as u32)
}

/// Makes the system close the connection if sent data is not acknowledged for `lost_after`; meanwhile it sends no
/// probes. Not for connections that a busy peer may leave unread, since these would be closed too.
pub(crate) fn give_up_after(socket: &TcpStream, lost_after: Duration) {
    let milliseconds = lost_after.as_millis().clamp(1, i32::MAX as u128) as u32;
    if let Err(error) = rustix::net::sockopt::set_tcp_user_timeout(socket, milliseconds) {
        log::debug!("no limit for unacknowledged data: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_take_as_long_as_a_host_may_be_out_of_reach() {
        assert_eq!(probes(Duration::from_secs(120)), (15, 5, 21));
        for seconds in [2, 3, 7, 30, 31, 120, 600, 3600, 100_000] {
            let (idle, interval, count) = probes(Duration::from_secs(seconds));
            let sum = idle + interval * u64::from(count);
            assert!((seconds..seconds + interval).contains(&sum), "{seconds}: {idle} + {count} * {interval}");
        }
        for extreme in [Duration::ZERO, Duration::from_millis(1), Duration::MAX] {
            let (idle, interval, count) = probes(extreme);
            assert!(idle > 0 && (1..=32_767).contains(&interval) && (1..=127).contains(&count), "{extreme:?}");
        }
    }

    #[test]
    fn sockets_take_every_limit() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        for lost_after in [Duration::ZERO, Duration::from_secs(120), Duration::MAX] {
            let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            keep_alive(&socket, lost_after);
            give_up_after(&socket, lost_after);
            let (idle, _, count) = probes(lost_after);
            use rustix::net::sockopt;
            assert!(sockopt::socket_keepalive(&socket).unwrap());
            assert_eq!(sockopt::tcp_keepidle(&socket).unwrap().as_secs(), idle);
            assert_eq!(sockopt::tcp_keepcnt(&socket).unwrap(), count);
            let limit = u128::from(sockopt::tcp_user_timeout(&socket).unwrap());
            assert_eq!(limit, lost_after.as_millis().clamp(1, i32::MAX as u128));
        }
    }
}
