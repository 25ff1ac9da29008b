//! The programs' values as bytes: CBOR (RFC 8949) which, unlike JSON, has NaN and infinities.
use ciborium::Value;
use ciborium::de::Error;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The bytes of `value`, the same for equal values: maps are sorted by their keys.
pub fn encode(value: &impl Serialize) -> Result<Vec<u8>, String> {
    let mut value = Value::serialized(value).map_err(|ciborium::value::Error::Custom(reason)| reason)?;
    sort(&mut value)?;
    write(&value)
}

pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    let mut rest = bytes;
    let value = ciborium::from_reader(&mut rest).map_err(|error| match error {
        Error::Io(error) => error.to_string(),
        Error::Syntax(at) => format!("byte {at} does not continue a value"),
        Error::Semantic(_, reason) => reason,
        Error::RecursionLimitExceeded => "it is nested too deeply".to_string(),
    })?;
    match rest {
        [] => Ok(value),
        rest => Err(format!("{} bytes follow the value", rest.len())),
    }
}

fn write(value: &Value) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    ciborium::into_writer(value, &mut bytes).map_err(|error| error.to_string())?;
    Ok(bytes)
}

fn sort(value: &mut Value) -> Result<(), String> {
    match value {
        Value::Array(values) => values.iter_mut().try_for_each(sort),
        Value::Tag(_, value) => sort(value),
        Value::Map(entries) => {
            let mut sorted = Vec::with_capacity(entries.len());
            for (mut key, mut value) in std::mem::take(entries) {
                sort(&mut key)?;
                sort(&mut value)?;
                sorted.push((write(&key)?, (key, value)));
            }
            sorted.sort_by(|(key, _), (other, _)| key.cmp(other));
            entries.extend(sorted.into_iter().map(|(_, entry)| entry));
            Ok(())
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;
    use std::collections::BTreeMap;

    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
    #[serde(untagged)]
    enum Any {
        Number(f64),
        List(Vec<Any>),
        Text(String),
    }

    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
    enum Kind {
        Unit,
        New(u8),
        Pair(i64, char),
        Struct { a: Option<bool>, b: () },
    }

    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
    struct All {
        kinds: Vec<Kind>,
        #[serde(flatten)]
        rest: BTreeMap<String, Any>,
    }

    #[test]
    fn what_serde_writes_comes_back() {
        let all = All {
            kinds: vec![Kind::Unit, Kind::New(7), Kind::Pair(i64::MIN, 'ß'), Kind::Struct { a: Some(true), b: () }],
            rest: [("x".to_string(), Any::List(vec![Any::Number(f64::INFINITY), Any::Text("a".to_string())]))].into(),
        };
        assert_eq!(decode::<All>(&encode(&all).unwrap()), Ok(all));
        let bits = |value: f64| decode::<f64>(&encode(&value).unwrap()).unwrap().to_bits();
        for value in [0.1, -0.0, f64::MIN_POSITIVE, f64::MAX, f64::NEG_INFINITY, f64::NAN] {
            assert_eq!(bits(value), value.to_bits(), "{value}");
        }
        assert_eq!(decode::<Vec<u64>>(&encode(&[u64::MAX]).unwrap()), Ok(vec![u64::MAX]));
    }

    #[test]
    fn damaged_bytes_are_errors() {
        let bytes = encode(&vec!["a".to_string()]).unwrap();
        assert!(decode::<Vec<String>>(&bytes[..bytes.len() - 1]).is_err());
        assert_eq!(decode::<Vec<String>>(&[&bytes[..], &[0]].concat()).unwrap_err(), "1 bytes follow the value");
        assert!(decode::<u64>(&bytes).unwrap_err().contains("invalid type"), "{:?}", decode::<u64>(&bytes));
        assert!(decode::<u64>(&[0xff]).is_err() && decode::<Vec<u64>>(&[0x9b; 9]).is_err());
    }
}
