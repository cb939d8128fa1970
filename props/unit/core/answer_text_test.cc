// The text of an answer: stop strings and characters that are divided.

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "core/index.h"
#include "kvtwin/serving.h"

namespace kvtwin::props {
namespace {

using Texts = std::vector<std::string>;

// Returns the texts that are shown after each token and at the end.
Texts Shown(const Texts& stops, const Texts& tokens) {
  AnswerText text(stops);
  Texts shown;
  for (const std::string& token : tokens) shown.push_back(text.Add(token));
  shown.push_back(text.End());
  return shown;
}

std::string JoinedText(const Texts& texts) {
  std::string all;
  for (const std::string& text : texts) all += text;
  return all;
}

// The definition: the first byte at which some stop string ends, and the
// longest of those that end there.
std::string Expected(const Texts& stops, const std::string& text) {
  for (std::size_t end = 1; end <= text.size(); ++end) {
    std::size_t longest = 0;
    for (const std::string& stop : stops) {
      if (text.substr(0, end).ends_with(stop)) {
        longest = std::max(longest, stop.size());
      }
    }
    if (longest > 0) return text.substr(0, end - longest);
  }
  return text;
}

Texts BytesOf(const std::string& text) {
  Texts bytes;
  for (const char byte : text) bytes.emplace_back(1, byte);
  return bytes;
}

TEST(AnswerText, ShowsAllWithoutStopStrings) {
  EXPECT_EQ(Shown({}, {"ab", "", "c"}), Texts({"ab", "", "c", ""}));
  EXPECT_EQ(Shown({""}, {"ab"}), Texts({"ab", ""}));
  const std::string zero(1, '\0');
  EXPECT_EQ(Shown({""}, {zero}), Texts({zero, ""}));
}

TEST(AnswerText, HoldsTheBeginningOfAStopString) {
  EXPECT_EQ(Shown({"end"}, {"a e", "n", "e"}), Texts({"a ", "", "en", "e"}));
  EXPECT_EQ(Shown({"end"}, {"a e", "n", "d more"}), Texts({"a ", "", "", ""}));
  // "aab" overlaps itself.
  EXPECT_EQ(Shown({"aab"}, {"a", "a", "a", "b"}), Texts({"", "", "a", "", ""}));
  EXPECT_EQ(Shown({"abab"}, {"abaab", "ab"}), Texts({"aba", "", ""}));
  EXPECT_EQ(JoinedText(Shown({"aabaaa"}, {"aabaabaaa", "x"})), "aab");
}

TEST(AnswerText, TheStopStringThatIsCompleteFirstEndsTheAnswer) {
  EXPECT_EQ(JoinedText(Shown({"abcd", "c"}, {"xabcd"})), "xab");
  EXPECT_EQ(JoinedText(Shown({"c", "abcd"}, {"xabcd"})), "xab");
  EXPECT_EQ(JoinedText(Shown({"bc", "abc", "c"}, {"xab", "c"})), "x");
  EXPECT_EQ(JoinedText(Shown({"", "b", "b"}, {"ab"})), "a");
}

TEST(AnswerText, AfterTheEndNothingIsAdded) {
  AnswerText text({"b"});
  EXPECT_FALSE(text.stopped());
  EXPECT_EQ(text.Add("ab"), "a");
  EXPECT_TRUE(text.stopped());
  EXPECT_EQ(text.Add("c"), "");
  EXPECT_EQ(text.End(), "");

  AnswerText ended({"bc"});
  EXPECT_EQ(ended.Add("ab"), "a");
  EXPECT_EQ(ended.End(), "b");
  EXPECT_EQ(ended.Add("c"), "");
  EXPECT_FALSE(ended.stopped());
  EXPECT_EQ(ended.removed(), 0);
}

TEST(AnswerText, CountsTheTokensOfTheStopString) {
  const auto removed = [](const Texts& tokens) {
    AnswerText text({"stop"});
    for (const std::string& token : tokens) {
      text.Add(token);
    }
    EXPECT_TRUE(text.stopped());
    return text.removed();
  };
  EXPECT_EQ(removed({"a", "stop"}), 1);
  EXPECT_EQ(removed({"a", "s", "", "to", "p b"}), 4);
  EXPECT_EQ(removed({"as", "top"}), 2);
  EXPECT_EQ(removed({"a", "", "stop"}), 1);
  EXPECT_EQ(removed({"sto", "sto", "p"}), 2);
}

// Characters of one to four bytes, divided everywhere.
TEST(AnswerText, ShowsWholeCharacters) {
  const Texts characters = {"a", "\u00e9", "\u20ac", "\U0001f600", "z"};
  const std::string all = JoinedText(characters);
  for (std::size_t first = 0; first <= all.size(); ++first) {
    for (std::size_t second = first; second <= all.size(); ++second) {
      const Texts shown =
          Shown({}, {all.substr(0, first), all.substr(first, second - first),
                     all.substr(second)});
      EXPECT_EQ(JoinedText(shown), all);
      EXPECT_EQ(shown.back(), "");
      // Each part begins with a first byte.
      for (const std::string& part : shown) {
        EXPECT_TRUE(part.empty() || (part[0] & 0xC0) != 0x80) << first;
      }
    }
  }
  EXPECT_EQ(Shown({}, BytesOf("\u20ac")), Texts({"", "", "\u20ac", ""}));
  EXPECT_EQ(Shown({}, BytesOf("\U0001f600!")),
            Texts({"", "", "", "\U0001f600", "!", ""}));
}

TEST(AnswerText, ShowsBytesThatBeginNoCharacter) {
  for (const std::string text : {"\x80", "\xBF\xBF\xBF\xBF", "\xC0", "\xC1",
                                 "\xF5", "\xFF", "\xC3z", "\xE2\x82z"}) {
    AnswerText answer;
    EXPECT_EQ(answer.Add(text), text);
  }
  // A character that never becomes whole is shown at the end.
  EXPECT_EQ(Shown({}, {"a\xE2\x82"}), Texts({"a", "\xE2\x82"}));
}

TEST(AnswerText, AStopStringMayHaveAPartOfACharacter) {
  EXPECT_EQ(Shown({"\x82\xAC!"}, BytesOf("a\u20ac?")),
            Texts({"a", "", "", "", "\u20ac?", ""}));
  EXPECT_EQ(JoinedText(Shown({"\x82\xAC"}, BytesOf("a\u20ac"))), "a\xE2");
}

// A stop string of megabytes takes no memory and no time until it is matched.
TEST(AnswerText, ALongStopStringIsCheap) {
  const std::string stop = std::string(std::size_t{1} << 24, 'a') + "b";
  AnswerText text({stop, "ac"});
  const std::string part(1 << 10, 'a');
  for (int i = 0; i < 1 << 10; ++i) ASSERT_EQ(text.Add(part), "");
  EXPECT_EQ(text.Add("c").size(), (std::size_t{1} << 20) - 1);
}

// For two letters, so that stop strings overlap: whatever the tokens are, the
// text is the same, and nothing is shown that is taken back.
RC_GTEST_PROP(AnswerText, DoesNotDependOnTheTokens, ()) {
  const auto letters = [](int most) {
    return rc::gen::resize(
        most, rc::gen::container<std::string>(rc::gen::element('a', 'b')));
  };
  const Texts stops = *rc::gen::resize(
      4, rc::gen::container<Texts>(rc::gen::apply(
             [](char first, const std::string& rest) { return first + rest; },
             rc::gen::element('a', 'b'), letters(5))));
  const Texts tokens = *rc::gen::container<Texts>(letters(4));
  const std::string all = JoinedText(tokens);
  const std::string expected = Expected(stops, all);
  RC_ASSERT(JoinedText(Shown(stops, tokens)) == expected);
  RC_ASSERT(JoinedText(Shown(stops, BytesOf(all))) == expected);

  AnswerText text(stops);
  std::size_t end = 0, ends = 0;
  for (const std::string& token : tokens) {
    if (text.stopped()) break;
    text.Add(token);
    end += token.size();
    ends += end > expected.size() ? 1 : 0;
  }
  RC_ASSERT(text.stopped() == (expected.size() < all.size()));
  RC_ASSERT(!text.stopped() || AsSize(text.removed()) == ends);
}

// The text is a long beginning of the stop string, over and over. If each token
// touched all that is held back, this would take half a minute.
TEST(AnswerText, TakesNoLongerForTokensThatAreHeldBack) {
  constexpr std::size_t kHeld = 100000;
  AnswerText text({std::string(kHeld, 'a') + "b"});
  std::size_t shown = 0;
  for (std::size_t i = 0; i < 3 * kHeld; ++i) shown += text.Add("a").size();
  EXPECT_EQ(shown, 2 * kHeld);
  EXPECT_EQ(text.Add("b"), "");
  EXPECT_EQ(text.removed(), AsInt(kHeld + 1));
}

}  // namespace
}  // namespace kvtwin::props
