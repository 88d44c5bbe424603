#![no_main]
#![allow(missing_docs)]

// perftest's handshake, as anybody who reaches the port may send it: decoding never panics, what it accepts keeps its
// bounds, and a message that is accepted is made again as it was, but for what perftest ignores.

#[path = "../../tools/src/perf/perftest/codec.rs"]
#[allow(dead_code)]
mod codec;

use codec::{Caller, KEYS_BYTES, Keys, Report, VERSION_BYTES, Version};

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let Some((&first, _)) = data.split_first() else { return };
    let caller = Caller::of(first);
    if let Some(bytes) = data.first_chunk::<VERSION_BYTES>()
        && let Ok(version) = Version::decode(bytes)
    {
        assert!(version.hundredths >= 570 && caller == Some(Caller::Version));
        assert_eq!(Version::decode(&Version::ours(version.mark).encode()).map(|v| v.mark), Ok(version.mark));
    }
    if let Some(bytes) = data.first_chunk::<KEYS_BYTES>()
        && let Ok(keys) = Keys::decode(bytes)
    {
        assert!((2..=0xff_fffe).contains(&keys.qpn.get()) && keys.out_reads > 0 && !keys.gid.is_multicast());
        assert_eq!(keys.encode().to_ascii_lowercase(), bytes.to_ascii_lowercase());
    }
    if let Some(bytes) = data.first_chunk::<4>() {
        for value in [codec::cycle_buffer(*bytes), codec::cache_line(*bytes)].into_iter().flatten() {
            assert!(value.is_power_of_two() && value.to_be_bytes() == *bytes);
        }
    }
    if let Some(bytes) = data.first_chunk::<2>()
        && let Ok(mtu) = codec::decode_mtu(*bytes)
    {
        assert_eq!(codec::encode_mtu(mtu), *bytes);
    }
    if let (chunks, _) = data.as_chunks::<8>()
        && let Some(values) = chunks.first_chunk::<5>()
        && let Ok(report) = Report::decode(*values)
    {
        assert!(report.peak >= 0.0 && report.average >= 0.0 && report.mpps >= 0.0);
        assert!(report.size <= 1 << 30 && Report::decode(report.encode()) == Ok(report));
    }
});
