//! The Parquet dataset of docs/shards.md, whose code it has.
use candle_ddp::data::Dataset;
use candle_ddp::seed::Generator;
use candle_ddp::{Error, Result};
use parquet::data_type::Int32Type;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::file::writer::SerializedFileWriter;
use parquet::record::{Row, RowAccessor};
use std::sync::{Arc, Mutex};

struct Parquet {
    reader: SerializedFileReader<std::fs::File>,
    rows_of_group: usize,
    /// Those that were read last, with their numbers: as many as the window of the order has.
    groups: Mutex<std::collections::VecDeque<(usize, Arc<Vec<Row>>)>>,
}

impl Dataset for Parquet {
    type Sample = Row;

    fn len(&self) -> usize {
        self.reader.metadata().file_metadata().num_rows() as usize
    }

    fn get(&self, index: usize, _: &mut Generator) -> Result<Row> {
        let invalid = |reason: String| Error::InvalidArgument { argument: "parquet", reason };
        let (number, row) = (index / self.rows_of_group, index % self.rows_of_group);
        let mut groups = self.groups.lock().expect("no panic while it is held");
        if let Some((_, group)) = groups.iter().find(|(kept, _)| *kept == number) {
            return Ok(group[row].clone());
        }
        let group = self.reader.get_row_group(number).map_err(|error| invalid(error.to_string()))?;
        let rows = group.get_row_iter(None).and_then(|rows| rows.collect::<parquet::errors::Result<Vec<_>>>());
        groups.push_front((number, Arc::new(rows.map_err(|error| invalid(error.to_string()))?)));
        groups.truncate(16);
        Ok(groups[0].1[row].clone())
    }
}

/// A file of three row groups, of which the last is shorter.
fn file() -> std::fs::File {
    let schema = parquet::schema::parser::parse_message_type("message rows { required int32 number; }").unwrap();
    let mut writer =
        SerializedFileWriter::new(tempfile::tempfile().unwrap(), Arc::new(schema), Default::default()).unwrap();
    for numbers in [0..5, 5..10, 10..12] {
        let mut group = writer.next_row_group().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        column.typed::<Int32Type>().write_batch(&numbers.collect::<Vec<i32>>(), None, None).unwrap();
        column.close().unwrap();
        group.close().unwrap();
    }
    writer.into_inner().unwrap()
}

#[test]
fn rows_are_read_in_any_order() {
    let reader = SerializedFileReader::new(file()).unwrap();
    let rows = Parquet { reader, rows_of_group: 5, groups: Mutex::default() };
    assert_eq!(rows.len(), 12);
    for index in [11, 0, 7, 4, 10, 5] {
        let row = rows.get(index, &mut Generator::new(0)).unwrap();
        assert_eq!(row.get_int(0).unwrap(), index as i32);
    }
}
