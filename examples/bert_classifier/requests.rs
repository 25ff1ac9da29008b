//! A small data set: requests to an assistant at home, in four classes.
use candle_ddp::seed::Generator;
use std::collections::BTreeSet;

/// How many sentences each class has.
const SENTENCES: usize = 150;
/// No single word tells the class: several of them have lamps, songs, alarms and rain.
const CLASSES: [(&str, [&str; 7]); 4] = [
    (
        "lights",
        [
            "turn on the lamp {place}",
            "turn the lights down {place} {time}",
            "it is too dark {place}",
            "make it brighter {place}, I cannot see the radio",
            "switch off every lamp {time}",
            "the lights should be {colour} {time}",
            "I want it {colour} {place} when it rains",
        ],
    ),
    (
        "music",
        [
            "turn on the radio {place}",
            "turn the volume down {place} {time}",
            "it is too quiet {place}",
            "play a song about the rain {time}",
            "switch to something with more drums {time}",
            "I want to hear that song about a {colour} lamp",
            "put on some jazz {place} {time}",
        ],
    ),
    (
        "reminder",
        [
            "wake me {time}",
            "set an alarm for the cake {place} {time}",
            "do not let me forget the {colour} umbrella {time}",
            "tell me {time} to buy a new lamp",
            "I have to water the plants {place} {time}",
            "note that the radio is on sale {time}",
            "what do I have to do {time}",
        ],
    ),
    (
        "weather",
        [
            "is it going to rain {time}",
            "do I need an umbrella {time}",
            "how warm will it be {place} {time}",
            "will the sky be {colour} {time}",
            "tell me how cold it is {place}",
            "is there a storm to be afraid of {time}",
            "what is it like outside {time}",
        ],
    ),
];
const FILLERS: [(&str, [&str; 6]); 3] = [
    ("{place}", ["in the kitchen", "upstairs", "in the garden", "by the door", "in Anna's room", "downstairs"]),
    ("{time}", ["tonight", "tomorrow morning", "at seven", "on Sunday", "in an hour", "this afternoon"]),
    ("{colour}", ["red", "blue", "green", "grey", "orange", "white"]),
];
const OPENINGS: [&str; 5] = ["", "please, ", "hey, ", "well, ", "listen: "];

/// Returns a line for each sentence, with its class and a tab before it. They are always the same, and none is there twice.
pub(crate) fn lines() -> String {
    let mut random = Generator::new(0);
    let mut below = |bound: usize| random.below(bound as u64) as usize;
    let (mut lines, mut seen) = (String::new(), BTreeSet::new());
    while seen.len() < SENTENCES * CLASSES.len() {
        // In turn, so that all have the same number.
        let (class, patterns) = CLASSES[seen.len() % CLASSES.len()];
        let mut sentence = OPENINGS[below(OPENINGS.len())].to_string() + patterns[below(patterns.len())];
        for (gap, words) in FILLERS {
            sentence = sentence.replace(gap, words[below(words.len())]);
        }
        if seen.insert(sentence.clone()) {
            lines += &format!("{class}\t{sentence}\n");
        }
    }
    lines
}
