#![no_main]
#![allow(missing_docs)]

use ferroce_api::appliance::{FromAppliance, decode, decode_client, encode};

// Any bytes as a message of the appliance's socket, in both directions: decoding never panics, and what it takes comes out
// of encoding and decoding unchanged.
libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Ok(message) = decode_client(data) {
        let bytes = encode(&message).expect("what was decoded is no longer than the limit allows");
        assert_eq!(decode_client(&bytes).expect("our own message"), message);
    }
    if let Ok(message) = decode::<FromAppliance>(data)
        && let Ok(bytes) = encode(&message)
    {
        let again = decode::<FromAppliance>(&bytes).expect("our own message");
        assert_eq!(encode(&again).expect("as long as before"), bytes);
    }
});
