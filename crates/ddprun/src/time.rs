//! UTC times for messages and folder names.
use std::time::{SystemTime, UNIX_EPOCH};

/// Returns year, month, day, hour, minute and second. Times that come from elsewhere end with the year 9999.
fn civil(time: SystemTime) -> [u64; 6] {
    const LAST: u64 = 253_402_300_799;
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs().min(LAST));
    let mut days = seconds / 86_400;
    let leap = |year: u64| (year.is_multiple_of(4) && !year.is_multiple_of(100)) || year.is_multiple_of(400);
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let mut month = 1;
    for length in [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    [year, month, days + 1, seconds / 3600 % 24, seconds / 60 % 60, seconds % 60]
}

/// Formats a time as `2026-02-28 23:59:59 UTC`.
pub(crate) fn readable(time: SystemTime) -> String {
    let [year, month, day, hour, minute, second] = civil(time);
    format!("{year}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}

/// Formats a time as `20260228T235959`.
pub(crate) fn compact(time: SystemTime) -> String {
    let [year, month, day, hour, minute, second] = civil(time);
    format!("{year}{month:02}{day:02}T{hour:02}{minute:02}{second:02}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn known_times() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        assert_eq!(readable(at(0)), "1970-01-01 00:00:00 UTC");
        assert_eq!(readable(at(951_827_696)), "2000-02-29 12:34:56 UTC");
        assert_eq!(readable(at(4_107_542_399)), "2100-02-28 23:59:59 UTC");
        assert_eq!(compact(at(4_107_542_400)), "21000301T000000");
        assert_eq!(compact(at(1_798_761_599)), "20261231T235959");
        assert_eq!(readable(at(u64::MAX / 1000)), "9999-12-31 23:59:59 UTC");
    }
}
